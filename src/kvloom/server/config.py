"""ServerConfig, and config.json in both of its layouts. Their camelCase names live here and nowhere else.

Layout 1 (seed 001, 2.3.1): OtherParam / WorkFlowParam / ModelDeployParam / ScheduleParam. Layout 2: ServerConfig /
BackendConfig / LogConfig. Every known key has its type, range and effect in one table; other keys are refused.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvloom.engine.config import EngineConfig
from kvloom.engine.errors import BadRequest
from kvloom.server.tls import TlsConfig

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 10 * 2**20
GB = 2**30


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What the server does beside running the model."""

    engine: EngineConfig
    served_model_name: str
    host: str = "127.0.0.1"
    port: int = 1025
    max_link_num: int = 300  # requests served at once; twice as many wait
    grace_s: float = 30.0  # running requests may take so long to finish when the server is told to stop
    max_body_bytes: int = 40 * 2**20
    validates_model: bool = True  # a wrong `model` is a 404, not served by this one
    allows_all_addresses: bool = False  # 0.0.0.0 and :: may be listened on
    tls: TlsConfig | None = None  # None = plain HTTP
    api_key_hashes: tuple[str, ...] = ()  # none = no key is asked for

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise BadRequest("port", f"must be between 0 and 65535, got {self.port}")
        if self.max_link_num < 1:
            raise BadRequest("maxLinkNum", f"must be at least 1, got {self.max_link_num}")


@dataclass(frozen=True, slots=True)
class Key:
    """One key: its type, its range or choices, and the setting it becomes (none: accepted, without effect here)."""

    type: type | tuple[type, ...]
    low: float | None = None
    high: float | None = None
    choices: tuple[Any, ...] = ()
    setting: str = ""

    def check(self, path: str, value: Any) -> None:
        """Raises BadRequest with the JSON path, the value and what is allowed."""
        types = self.type if isinstance(self.type, tuple) else (self.type,)
        is_wrong = not isinstance(value, types) or (isinstance(value, bool) and bool not in types)
        if is_wrong:
            names = " or ".join(_TYPE_NAMES[t] for t in types)
            raise BadRequest(path, f"must be {names}, got {json.dumps(value)}")
        if self.choices and value not in self.choices:
            raise BadRequest(
                path, f"must be one of {', '.join(map(json.dumps, self.choices))}, got {json.dumps(value)}"
            )
        if (self.low is not None and value < self.low) or (self.high is not None and value > self.high):
            limit = f"at least {self.low:g}" if self.high is None else f"between {self.low:g} and {self.high:g}"
            raise BadRequest(path, f"must be {limit}, got {value}")


_TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", list: "a list"}
_NUMBER = (int, float)

_SERVE = {
    "ipAddress": Key(str, setting="host"),
    "port": Key(int, 1024, 65535, setting="port"),
    "maxLinkNum": Key(int, 1, 1000, setting="max_link_num"),
    "httpsEnabled": Key(bool, setting="https"),
    "validateModel": Key(bool, setting="validates_model"),
    "tlsCaPath": Key(str, setting="tls_ca_path"),
    "tlsCaFile": Key(list, setting="tls_ca_files"),
    "tlsCert": Key(str, setting="tls_cert"),
    "tlsPk": Key(str, setting="tls_key"),
    "tlsPkPwd": Key(str, setting="tls_key_password"),
    "kmcKsfMaster": Key(str, setting="keystore_master"),
    "kmcKsMaster": Key(str, setting="keystore_master"),
    "kmcKsfStandby": Key(str, setting="keystore_standby"),
    "kmcKsStandby": Key(str, setting="keystore_standby"),
    "tlsCrl": Key(str, setting="tls_crl"),
}
_LOG = {
    "logLevel": Key(str, choices=("Verbose", "Info", "Warning", "Error", "None"), setting="log_level"),
    "logPath": Key(str),
}
_MODEL = {
    "modelInstanceType": Key(str, choices=("Standard", "StandardMock"), setting="instance_type"),
    "modelName": Key(str, setting="served_model_name"),
    "modelWeightPath": Key(str, setting="model"),
    "worldSize": Key(int, choices=(1,)),
    "cpuMemSize": Key(_NUMBER, 0),
    "npuMemSize": Key(_NUMBER, -1, setting="kv_cache_gb"),
    "backendType": Key(str),
}
_SCHEDULE = {
    "maxPrefillBatchSize": Key(int, 0, setting="max_prefill_batch"),
    "maxPrefillTokens": Key(int, 1, 409600, setting="max_prefill_tokens"),
    "prefillTimeMsPerReq": Key(int, 0, setting="prefill_ms_per_seq"),
    "prefillPolicyType": Key(int, choices=(0, 1, 3), setting="prefill_policy"),
    "decodeTimeMsPerReq": Key(int, 0, setting="decode_ms_per_seq"),
    "decodePolicyType": Key(int, choices=(0, 1, 3), setting="decode_policy"),
    "maxBatchSize": Key(int, 1, 5000, setting="max_batch"),
    "maxIterTimes": Key(int, 1, setting="max_iter_times"),
    "maxPreemptCount": Key(int, 0, setting="max_preempt"),
    "supportSelectBatch": Key(bool, setting="is_selecting"),
    "maxQueueDelayMicroseconds": Key(int, 0, setting="max_queue_delay_us"),
}
_TEMPLATE = {
    "templateType": Key(str, choices=("Standard",)),
    "templateName": Key(str),
    "pipelineNumber": Key(int, 1, 10),
}
_RESOURCE = {"cacheBlockSize": Key(int, 1, 128), "preAllocBlocks": Key(int, 0)}
_DEPLOY = {"maxSeqLen": Key(int, 1, setting="max_seq_len"), "npuDeviceIds": Key(list)}

LAYOUT_1: Mapping[str, Any] = {
    "OtherParam": {"ResourceParam": _RESOURCE, "LogParam": _LOG, "ServeParam": _SERVE},
    "WorkFlowParam": {"TemplateParam": _TEMPLATE},
    "ModelDeployParam": {**_DEPLOY, "ModelParam": [_MODEL]},
    "ScheduleParam": _SCHEDULE,
}
LAYOUT_2: Mapping[str, Any] = {
    "Version": Key(str),
    "ServerConfig": {
        **_SERVE,
        "allowAllZeroIpListening": Key(bool, setting="allows_all_addresses"),
        "fullTextEnabled": Key(bool, choices=(False,)),
    },
    "BackendConfig": {
        "npuDeviceIds": Key(list),
        "ModelDeployConfig": {**_DEPLOY, "ModelConfig": [_MODEL]},
        "ScheduleConfig": {**_SCHEDULE, **_TEMPLATE, **_RESOURCE},
    },
    "LogConfig": _LOG,
}


def load_settings(path: Path) -> dict[str, Any]:
    """The settings that a config.json gives, by this project's names. Raises BadRequest: one message a mistake."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise BadRequest(str(path), f"is larger than {MAX_FILE_BYTES} bytes")
        if path.stat().st_mode & 0o022:
            raise BadRequest(str(path), "can be written by others; run: chmod 640 " + str(path))
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadRequest(str(path), f"cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise BadRequest(str(path), f"is not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise BadRequest(str(path), "must hold a JSON object")
    layout = LAYOUT_2 if "ServerConfig" in document else LAYOUT_1
    found = dict(_walk(layout, document, ""))
    idle = sorted(key for key in found if key.startswith("$"))
    if idle:
        log.info("%s: without effect here: %s", path, ", ".join(name[1:] for name in idle))
    settings = {name: value for name, value in found.items() if not name.startswith("$")}
    if settings.pop("https", False):
        settings["tls"] = _tls_of(settings, path)
    return settings


def _tls_of(settings: Mapping[str, Any], file: Path) -> TlsConfig:
    """Paths are relative to the install folder: the one that holds config.json, or `conf/config.json`."""
    for name, key in _TLS_REQUIRED.items():
        if not settings.get(name):
            raise BadRequest(key, "is required when httpsEnabled is true")
    home = file.resolve().parent
    home = home.parent if home.name == "conf" else home

    def optional(name: str) -> Path | None:
        return home / settings[name] if settings.get(name) else None

    return TlsConfig(
        ca_files=tuple(home / settings["tls_ca_path"] / str(name) for name in settings["tls_ca_files"]),
        cert=home / settings["tls_cert"],
        key=home / settings["tls_key"],
        key_password=optional("tls_key_password"),
        keystore_master=home / settings["keystore_master"],
        keystore_standby=home / settings["keystore_standby"],
        crl=optional("tls_crl"),
    )


_TLS_REQUIRED = {
    "tls_ca_path": "tlsCaPath",
    "tls_ca_files": "tlsCaFile",
    "tls_cert": "tlsCert",
    "tls_key": "tlsPk",
    "keystore_master": "kmcKsfMaster",
    "keystore_standby": "kmcKsfStandby",
}


def _walk(layout: Any, value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """(setting, value) of each key below; keys without effect come as "$" and their path."""
    if isinstance(layout, Key):
        layout.check(path, value)
        yield (layout.setting or f"${path}"), value
    elif isinstance(layout, list):
        if not isinstance(value, list) or len(value) != 1:
            raise BadRequest(path, "must be a list of one model")
        yield from _walk(layout[0], value[0], f"{path}[0]")
    else:
        if not isinstance(value, dict):
            raise BadRequest(path, f"must be an object, got {json.dumps(value)[:40]}")
        for name, item in value.items():
            below = f"{path}.{name}" if path else name
            if name not in layout:
                raise BadRequest(below, f"is not known; known are {', '.join(layout)}")
            yield from _walk(layout[name], item, below)


@dataclass(slots=True)
class Settings:
    """Settings of a file, overridden by flags; None = not given."""

    values: dict[str, Any] = field(default_factory=dict)

    def override(self, **flags: Any) -> None:
        self.values |= {name: value for name, value in flags.items() if value is not None}

    def build(self, model: str) -> ServerConfig:
        """`model`: a resolved path, or "" for the fake backend. Raises BadRequest naming the setting."""
        values = self.values
        server = {name: values[name] for name in _SERVER_FIELDS if name in values}
        engine = {name: values[name] for name in _ENGINE_FIELDS if name in values}
        gigabytes = values.get("kv_cache_gb", -1)
        if gigabytes >= 0 and "num_blocks" not in engine:
            engine["kv_cache_bytes"] = max(1, int(gigabytes * GB))
        if "max_queue_delay_us" in values:
            engine["max_queue_delay_s"] = values["max_queue_delay_us"] / 1e6
        if "max_batch" in engine:
            engine["max_tokens_per_step"] = max(512, engine["max_batch"])
        name = values.get("served_model_name") or (Path(model).stem if model else "mock")
        return ServerConfig(EngineConfig(model=model, **engine), name, **server)


_SERVER_FIELDS = (
    "host",
    "port",
    "max_link_num",
    "grace_s",
    "validates_model",
    "allows_all_addresses",
    "tls",
    "api_key_hashes",
)
_ENGINE_FIELDS = (
    "backend",
    "device",
    "dtype",
    "weight_format",
    "max_seq_len",
    "num_blocks",
    "max_batch",
    "seed",
    "max_prefill_batch",
    "max_prefill_tokens",
    "prefill_ms_per_seq",
    "prefill_policy",
    "decode_ms_per_seq",
    "decode_policy",
    "max_iter_times",
    "max_preempt",
    "is_selecting",
)
