"""ServerConfig, and how a config.json becomes one; its keys are in config_keys.py."""

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvloom.engine.config import EngineConfig, TierConfig
from kvloom.engine.errors import BadRequest
from kvloom.engine.memory import bytes_of_gb
from kvloom.server.auth import read_hashes
from kvloom.server.card import ModelCard
from kvloom.server.config_keys import LAYOUT_1, LAYOUT_2, Key
from kvloom.server.logs import LogConfig
from kvloom.server.options import WireOptions
from kvloom.server.tls import TlsConfig

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 10 * 2**20
DEFAULT_HOST = "127.0.0.1"
# a text, which is kept, or a comment to the end of the line, which is not
_COMMENT = re.compile(r'("(?:[^"\\]|\\.)*")|//[^\n]*')


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What the server does, and the models it serves; the first is the default."""

    models: tuple[ModelCard, ...]
    host: str = DEFAULT_HOST
    port: int = 1025
    management: tuple[str, int] | None = None  # address and port of the status routes; None = with the others
    max_link_num: int = 300  # requests served at once; twice as many wait
    max_queued_tokens: int | None = None  # prompt tokens served and waiting; None = any
    grace_s: float = 30.0  # running requests may take so long to finish when the server is told to stop
    max_body_bytes: int = 40 * 2**20
    options: WireOptions = field(default_factory=WireOptions)
    allows_all_addresses: bool = False  # 0.0.0.0 and :: may be listened on
    tls: TlsConfig | None = None  # None = plain HTTP
    api_key_hashes: tuple[str, ...] = ()  # none = no key is asked for
    cors_origins: tuple[str, ...] = ()  # whose pages may call; none = no page of another origin
    log: LogConfig = field(default_factory=LogConfig)
    pid_file: Path | None = None
    otlp_endpoint: str = ""  # collector of traces; "" = as OTEL_EXPORTER_OTLP_ENDPOINT says, or none

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise BadRequest("port", f"must be between 0 and 65535, got {self.port}")
        if self.max_link_num < 1:
            raise BadRequest("maxLinkNum", f"must be at least 1, got {self.max_link_num}")
        names = [card.name for card in self.models]
        if len(set(names)) < len(names):
            raise BadRequest("modelName", f"must differ from model to model, got {', '.join(names)}")
        if self.management is not None and self.management[1] == self.port:
            raise BadRequest("managementPort", f"must differ from port, got {self.port}")

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Where to listen: for everybody, and for the management routes when they are apart."""
        return [(self.host, self.port), *([self.management] if self.management else [])]


def load_settings(path: Path) -> dict[str, Any]:
    """The settings that a config.json gives, by this project's names, and "models", a list of such.

    Raises BadRequest: one message a mistake, with the JSON path, the value and what is allowed.
    """
    document = _read(path)
    layout = LAYOUT_2 if "ServerConfig" in document else LAYOUT_1
    found = _Found()
    _walk(layout, document, "", found, found.values)
    found.check_together()
    if found.idle:
        log.info("%s: without effect here: %s", path, ", ".join(sorted(found.idle)))
    home = install_folder(path)
    settings = found.values
    for model in settings.get("models", ()):
        if "lora_modules" in model:
            model["lora_modules"] = [(name, home / path) for name, path in map(lora_module, model["lora_modules"])]
    if "lora_root" in settings:
        settings["lora_root"] = home / settings["lora_root"]
    if settings.pop("https", False):
        settings["tls"] = _tls_of(settings, home)
    for name in ("kv_pool_socket", "kv_pool_access_key_file"):
        if settings.get(name):
            settings[name] = str(home / settings[name])
    if "log_path" in settings:
        settings["log_path"] = home / str(settings["log_path"]).lstrip("/")
    if "api_key_file" in settings:
        settings["api_key_hashes"] = read_hashes(home / settings.pop("api_key_file"))
    return settings


def lora_module(text: object) -> tuple[str, Path]:
    """Name and folder of "NAME=FOLDER". Raises BadRequest."""
    name, is_pair, path = text.partition("=") if isinstance(text, str) else ("", "", "")
    if not (name and is_pair and path):
        raise BadRequest("loraModules", f"must be NAME=FOLDER, got {json.dumps(text)}")
    return name, Path(path)


def install_folder(path: Path) -> Path:
    """What the file's paths are relative to: the folder that holds config.json, or conf/config.json."""
    home = path.resolve().parent
    return home.parent if home.name == "conf" else home


def _read(path: Path) -> dict[str, Any]:
    """The JSON object in the file; `//` comments are allowed. Raises BadRequest."""
    try:
        status = path.stat()
        if status.st_size > MAX_FILE_BYTES:
            raise BadRequest(str(path), f"is larger than {MAX_FILE_BYTES} bytes")
        if status.st_mode & 0o022:
            raise BadRequest(str(path), "can be written by others; run: chmod 640 " + str(path))
        if status.st_mode & 0o004:
            log.warning("%s can be read by everybody; run: chmod 640 %s", path, path)
        document = json.loads(_COMMENT.sub(lambda found: found[1] or "", path.read_text(encoding="utf-8")))
    except OSError as error:
        raise BadRequest(str(path), f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise BadRequest(str(path), f"is not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise BadRequest(str(path), "must hold a JSON object")
    return document


@dataclass(slots=True)
class _Found:
    """What a document gave. `paths`: where each setting stood; `idle`: paths of keys without effect."""

    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)
    idle: list[str] = field(default_factory=list)

    def check_together(self) -> None:
        """Ranges that depend on another key (seed 001, tables 2-1 and 2-6). Raises BadRequest."""
        values = self.values
        for name, other, offset in _BELOW:
            if name in values and other in values and values[name] > values[other] - offset:
                raise BadRequest(
                    self.paths[name],
                    f"must be at most {values[other] - offset} ({self.paths[other]}"
                    f"{f' - {offset}' if offset else ''}), got {values[name]}",
                )
        if {"prealloc_blocks", "max_iter_times", "block_size"} <= values.keys():
            limit = -(-values["max_iter_times"] // values["block_size"])
            if values["prealloc_blocks"] > limit:
                path, got = self.paths["prealloc_blocks"], values["prealloc_blocks"]
                raise BadRequest(path, f"must be at most {limit} (maxIterTimes / cacheBlockSize), got {got}")


_BELOW = (
    ("max_iter_times", "max_seq_len", 1),
    ("max_prefill_batch", "max_batch", 0),
    ("max_preempt", "max_batch", 0),
)


def _walk(layout: Any, value: Any, path: str, found: _Found, into: dict[str, Any]) -> None:
    """Check `value` and all below against the layout; settings go `into`, each model's into one of its own."""
    if isinstance(layout, Key):
        layout.check(path, value)
        if layout.setting:
            into[layout.setting] = value
            found.paths[layout.setting] = path
        else:
            found.idle.append(path)
    elif isinstance(layout, list):
        if not isinstance(value, list) or not value:
            raise BadRequest(path, "must be a list of models, at least one")
        found.values["models"] = [{} for _ in value]
        for i, (item, model) in enumerate(zip(value, found.values["models"], strict=True)):
            _walk(layout[0], item, f"{path}[{i}]", found, model)
    else:
        if not isinstance(value, dict):
            raise BadRequest(path, f"must be an object, got {json.dumps(value)[:40]}")
        for name in value:
            if name not in layout:
                raise BadRequest(_join(path, name), f"is not known; known are {', '.join(layout)}")
        for name in _missing(layout, value):
            raise BadRequest(_join(path, name), "is missing")
        for name, item in value.items():
            _walk(layout[name], item, _join(path, name), found, into)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _missing(layout: Mapping[str, Any], value: Mapping[str, Any]) -> Iterator[str]:
    """Required keys that are not there; a mock needs no weights."""
    is_mock = value.get("modelInstanceType") == "StandardMock"
    for name, below in layout.items():
        if name not in value and _is_required(below) and not (is_mock and name == "modelWeightPath"):
            yield name


def _is_required(layout: Any) -> bool:
    if isinstance(layout, Key):
        return layout.is_required
    below = layout[0].values() if isinstance(layout, list) else layout.values()
    return any(map(_is_required, below))


def _tls_of(settings: Mapping[str, Any], home: Path) -> TlsConfig:
    for name, key in _TLS_REQUIRED.items():
        if not settings.get(name):
            raise BadRequest(key, "is required when httpsEnabled is true")

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


@dataclass(slots=True)
class Settings:
    """Settings of a file and the environment, overridden by flags; None = not given."""

    values: dict[str, Any] = field(default_factory=dict)

    @property
    def models(self) -> list[dict[str, Any]]:
        """What is set for each model alone: name, model, backend, ..."""
        models: list[dict[str, Any]] = self.values.setdefault("models", [{}])
        return models

    def override(self, **flags: Any) -> None:
        self.values |= {name: value for name, value in flags.items() if value is not None}

    def override_model(self, **flags: Any) -> None:
        """Raises BadRequest when there are several models."""
        given = {name: value for name, value in flags.items() if value is not None}
        if given and len(self.models) > 1:
            raise BadRequest(min(given), f"cannot be given for the {len(self.models)} models of the configuration")
        self.models[0].update(given)

    def build(self) -> ServerConfig:
        """Each model's "model" must be a resolved path by now. Raises BadRequest naming the setting."""
        values = self.values
        server = {name: values[name] for name in _SERVER_FIELDS if name in values}
        if "max_body_mb" in values:
            server["max_body_bytes"] = values["max_body_mb"] * 2**20
        if "management_port" in values:
            server["management"] = (values.get("management_host", DEFAULT_HOST), values["management_port"])
        options = {name: values[name] for name in _OPTIONS if name in values}
        if values.get("openai_support", "vllm") != "vllm":
            options["default_max_tokens"] = 16
        return ServerConfig(
            tuple(self._card(model) for model in self.models),
            options=WireOptions(**options),
            log=LogConfig(
                values.get("log_level", "Warning"),
                values.get("log_path") or None,
                values.get("is_log_on_console", True),
            ),
            cors_origins=tuple(values.get("cors_origins", ())),
            **server,
        )

    def _card(self, model: Mapping[str, Any]) -> ModelCard:
        """One model's card: its own settings over those of all."""
        both = {**self.values, **model}
        engine = {name: both[name] for name in _ENGINE_FIELDS if name in both}
        if "num_blocks" not in engine:
            engine["kv_cache_bytes"] = bytes_of_gb(both.get("npu_mem_gb", -1))
        engine["host_cache_bytes"] = bytes_of_gb(both.get("cpu_mem_gb", 0))
        if "max_queue_delay_us" in both:
            engine["max_queue_delay_s"] = both["max_queue_delay_us"] / 1e6
        if "fair_token_us" in both:
            engine["fair_token_s"] = both["fair_token_us"] / 1e6
        if "max_batch" in engine:
            engine["max_tokens_per_step"] = max(512, engine["max_batch"])
        engine["kv_tier"] = _kv_tier(both)
        path = both.get("model") or ""
        name = model.get("name") or (Path(path).stem if path else "mock")
        card = {field: both[field] for field in _CARD_FIELDS if field in both}
        modules = tuple(model.get("lora_modules", ()))
        dtype = both.get("torch_dtype", "auto")
        return ModelCard(name, EngineConfig(model=path, **engine), dtype=dtype, lora_modules=modules, **card)


def _kv_tier(settings: Mapping[str, Any]) -> TierConfig | None:
    """The outer KV tier of kvPoolConfig. Raises BadRequest when its keys stand without a backend."""
    given = {name.removeprefix("kv_pool_"): value for name, value in settings.items() if name.startswith("kv_pool_")}
    if not settings.get("kv_pool"):
        if given:
            raise BadRequest("kvPoolConfig.backend", 'must be "ems" when other keys of kvPoolConfig are given')
        return None
    timeout_ms = given.pop("timeout_ms", 500)
    return TierConfig("kvloom.server.ems_tier:open_tier", timeout_ms / 1000, given)


_SERVER_FIELDS: Sequence[str] = (
    "host",
    "port",
    "max_link_num",
    "max_queued_tokens",
    "grace_s",
    "allows_all_addresses",
    "tls",
    "api_key_hashes",
    "pid_file",
    "otlp_endpoint",
)
_OPTIONS: Sequence[str] = (
    "validates_model",
    "max_input_chars",
    "is_full_text",
    "is_root_object",
    "is_input_echoed",
    "has_oip_health",
    "lora_root",
)
_CARD_FIELDS: Sequence[str] = (
    "instance_type",
    "npu_mem_gb",
    "cpu_mem_gb",
    "world_size",
    "tool_parser",
    "reasoning_parser",
)
_ENGINE_FIELDS: Sequence[str] = (
    "backend",
    "device",
    "dtype",
    "weight_format",
    "world_size",
    "kv_dtype",
    "num_speculative_tokens",
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
    "block_size",
    "prealloc_blocks",
    "is_selecting",
    "is_continuous",
    "step_timeout_s",
)
