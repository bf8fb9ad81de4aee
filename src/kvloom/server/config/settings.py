"""ServerConfig, built from a config.json, whose keys are in keys.py and which reading.py reads."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvloom.checkpoints.part_names import model_name
from kvloom.contract.capacity import bytes_of_gb
from kvloom.contract.config import MAX_BATCH, STEP_TOKENS, EngineConfig, TierConfig
from kvloom.contract.errors import BadRequest
from kvloom.net.sites import checked_hosts, checked_origins
from kvloom.net.tlsconfig import TlsConfig
from kvloom.server.config.backends import backend_of, is_elsewhere
from kvloom.server.config.devices import device_settings
from kvloom.server.config.given import check_given
from kvloom.server.config.key import shown
from kvloom.server.config.pictures import check_language, picture_card
from kvloom.server.config.plugin_options import VLLM_START_S, idle_notes, is_plugin, option_of, plugin_options
from kvloom.server.config.reading import Found, Mistakes, read_document
from kvloom.server.keeping.limits import Limits, limits_of
from kvloom.server.observe.logs import LogConfig, PythonLog
from kvloom.server.secure.api_keys import read_hashes
from kvloom.server.serving.card import ModelCard
from kvloom.server.serving.options import WireOptions
from kvloom.server.serving.pictures.card import PictureCard
from kvloom.server.serving.vision.hosts import checked_image_hosts

DEFAULT_HOST = "127.0.0.1"
KERNEL_BLOCK = 16  # tokens; the CPU kernels' block sizes are multiples of it
_KERNELS = ("auto", "cpu", "fake")  # back ends that need such sizes, or for which any size will do
MAX_GRACE_S = 86400
BY_PRIORITY = 2  # a policy of later releases; priorities count under every policy here


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What the server does, and the models it serves; the first is the default."""

    models: tuple[ModelCard, ...]
    pictures: tuple[PictureCard, ...] = ()  # text-to-image models
    host: str = DEFAULT_HOST
    port: int = 1025
    management: tuple[str, int] | None = None  # address and port of the status routes; None = the same as of the others
    metrics: tuple[str, int] | None = None  # address and port of /metrics; None = the same as of the status routes
    max_link_num: int = 300  # requests that run at once; twice as many may wait
    max_queued_tokens: int | None = None  # prompt tokens of running and waiting requests; None = unlimited
    grace_s: float = 30.0  # how long running requests may take to finish when the server stops
    max_body_bytes: int = 40 * 2**20
    num_parsers: int | None = None  # processes that parse large bodies; None = by the number of cores
    options: WireOptions = field(default_factory=WireOptions)
    allows_all_addresses: bool = False  # whether listening on 0.0.0.0 and :: is allowed
    tls: TlsConfig | None = None  # None = plain HTTP
    api_key_hashes: tuple[str, ...] = ()  # empty = no key is required
    cors_origins: frozenset[str] = frozenset()  # origins whose pages may send requests; empty = no other origin's
    allowed_hosts: frozenset[str] = frozenset()  # accepted host names, besides addresses and the machine's own names
    image_hosts: frozenset[str] = frozenset()  # servers that images are fetched from; empty = none
    may_stop_by_get: bool = False  # whether GET /stopService works even where any web page could send it
    log: LogConfig = field(default_factory=LogConfig)
    pid_file: Path | None = None
    response_store: Path | None = None  # file where responses are stored; None = they are not
    response_limits: Limits = field(default_factory=Limits)  # limits of that file
    workflow: str = ""  # a name for people
    otlp_endpoint: str = ""  # URL of the traces' collector; "" = OTEL_EXPORTER_OTLP_ENDPOINT, or none

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise BadRequest("port", f"must be between 0 and 65535, got {self.port}")
        if not 0 <= self.grace_s <= MAX_GRACE_S:
            raise BadRequest("grace", f"must be between 0 and {MAX_GRACE_S} s, got {self.grace_s}")
        if self.max_link_num < 1:
            raise BadRequest("maxLinkNum", f"must be at least 1, got {self.max_link_num}")
        if len(set(self.names)) < len(self.names):
            raise BadRequest("modelName", f"must differ from model to model, got {', '.join(self.names)}")
        if self.management is not None and self.management[1] == self.port:
            raise BadRequest("managementPort", f"must differ from port, got {self.port}")

    @property
    def names(self) -> list[str]:
        """Names of all models."""
        return [*(card.name for card in self.models), *(card.name for card in self.pictures)]

    @property
    def addresses(self) -> dict[str, tuple[str, int]]:
        """Addresses to listen on by the keys of their ports: the public one, then those of management and metrics
        routes if they are separate.
        """
        given = {"port": (self.host, self.port), "managementPort": self.management, "metricsPort": self.metrics}
        return {key: address for key, address in given.items() if address is not None}


def load_settings(path: Path) -> dict[str, Any]:
    """The settings of a config.json under this project's names, and "models", a list of each model's settings.

    "notes" are sentences for the log, once it is open. Raises BadRequest with every mistake of the file, a line each:
    the JSON path, the value and what is allowed.
    """
    found = read_document(path)
    home = install_folder(path)
    settings = found.values
    for index, model in enumerate(settings.get("models", ())):
        if "backend_type" in model:
            model["backend"] = backend_of(model["backend_type"])
            if is_elsewhere(name := model.pop("backend_type")):
                at = found.path_of("backend_type", index)
                found.notes.append(f"{path}: {at}: {name} is not here; the best of this machine takes its part")
        if "lora_modules" in model:
            model["lora_modules"] = [(name, home / path) for name, path in map(lora_module, model["lora_modules"])]
    _fit_blocks(found, path)
    found.notes += [f"{path}: {note}" for note in idle_notes(settings.get("models", []), found.paths)]
    for name in ("response_store", "lora_root"):
        if name in settings:
            settings[name] = home / settings[name]
    if settings.pop("https", False):
        settings["tls"] = _tls_of(found, path, home)
    for name in ("kv_pool_socket", "kv_pool_access_key_file"):
        if settings.get(name):
            settings[name] = str(home / settings[name])
    if "log_path" in settings:
        settings["log_path"] = home / str(settings["log_path"]).lstrip("/")
    if "api_key_file" in settings:
        file = home / settings.pop("api_key_file")
        settings["api_key_hashes"] = read_hashes(file, found.paths["api_key_file"])
    return settings | {"notes": found.notes}


def _fit_blocks(found: Found, path: Path) -> None:
    """Round the block size up for the CPU kernels; the torch backend, which supports any size, keeps the one given."""
    size = found.values.get("block_size", KERNEL_BLOCK)
    if size % KERNEL_BLOCK and any(model.get("backend", "auto") in _KERNELS for model in found.values["models"]):
        fitting = -(-size // KERNEL_BLOCK) * KERNEL_BLOCK
        at = found.paths["block_size"]
        found.notes.append(f"{path}: {at}: {size} is no multiple of {KERNEL_BLOCK}; blocks have {fitting} tokens")
        found.values["block_size"] = fitting


def lora_module(text: object) -> tuple[str, Path]:
    """Name and path of "NAME=PATH". Raises BadRequest."""
    name, is_pair, path = text.partition("=") if isinstance(text, str) else ("", "", "")
    if not (name and is_pair and path):
        raise BadRequest("loraModules", f"must be NAME=PATH, got {shown(text)}")
    return name, Path(path)


def install_folder(path: Path) -> Path:
    """The folder that the file's paths are relative to: the one that contains config.json, or conf/config.json."""
    home = path.resolve().parent
    return home.parent if home.name == "conf" else home


_TLS_REQUIRED = {
    "tls_ca_path": "tlsCaPath",
    "tls_ca_files": "tlsCaFile",
    "tls_cert": "tlsCert",
    "tls_key": "tlsPk",
    "keystore_master": "kmcKsfMaster",
    "keystore_standby": "kmcKsfStandby",
}


def _tls_of(found: Found, path: Path, home: Path) -> TlsConfig:
    """The TLS files. Raises BadRequest that lists every missing key."""
    settings = found.values
    missing = [key for name, key in _TLS_REQUIRED.items() if not settings.get(name)]
    above = found.paths["https"].rpartition(".")[0]
    told = [BadRequest(f"{above}.{key}", "is required when httpsEnabled is true") for key in missing]
    if len(told) > 1:
        raise Mistakes(path, told)
    if told:
        raise told[0]

    def optional(name: str) -> Path | None:
        return home / settings[name] if settings.get(name) else None

    crls = [home / settings.get("tls_crl_path", "") / name for name in settings.get("tls_crl_files", ())]
    if crl := optional("tls_crl"):
        crls.append(crl)
    return TlsConfig(
        ca_files=tuple(home / settings["tls_ca_path"] / name for name in settings["tls_ca_files"]),
        cert=home / settings["tls_cert"],
        key=home / settings["tls_key"],
        key_password=optional("tls_key_password"),
        keystore_master=home / settings["keystore_master"],
        keystore_standby=home / settings["keystore_standby"],
        crls=tuple(crls),
    )


@dataclass(slots=True)
class Settings:
    """Settings of a file and the environment, overridden by flags; None = not given."""

    values: dict[str, Any] = field(default_factory=dict)

    @property
    def models(self) -> list[dict[str, Any]]:
        """Settings of each single model: name, model, backend, ..."""
        models: list[dict[str, Any]] = self.values.setdefault("models", [{}])
        return models

    def override(self, **flags: Any) -> None:
        self.values |= {name: value for name, value in flags.items() if value is not None}

    def override_model(self, **flags: Any) -> None:
        """Override settings of the only model. Raises BadRequest when there are several."""
        given = {name: value for name, value in flags.items() if value is not None}
        if given and len(self.models) > 1:
            raise BadRequest(min(given), f"cannot be given for the {len(self.models)} models of the configuration")
        self.models[0].update(given)

    def add_models(self, pairs: Iterable[str]) -> None:
        """Append models, each given as NAME=FOLDER. Raises BadRequest."""
        for pair in pairs:
            name, is_pair, folder = pair.partition("=")
            if not (name and is_pair and folder):
                raise BadRequest("--image-model", f"must be NAME=FOLDER, got {shown(pair)}")
            check_given("--image-model", "name", name)
            self.models.append({"name": name, "model": folder})

    def add_vllm_options(self, pairs: Sequence[str]) -> None:
        """Set options of vLLM, each given as KEY=VALUE; they override the file's. Raises BadRequest."""
        if pairs:
            backend = self.models[0].get("backend", "auto")
            if backend != "vllm":
                raise BadRequest("vllm", f"gives options of backend vllm; this model has {backend!r}")
            given = dict(map(option_of, pairs))
            self.override_model(engine_options={**self.models[0].get("engine_options", {}), **given})

    def build(self) -> ServerConfig:
        """The ServerConfig. Each model's "model" must be a resolved path. Raises BadRequest that names the setting."""
        values = self.values
        server = {name: values[name] for name in _SERVER_FIELDS if name in values}
        if "max_body_mb" in values:
            server["max_body_bytes"] = values["max_body_mb"] * 2**20
        if "management_port" in values:
            server["management"] = (values.get("management_host", DEFAULT_HOST), values["management_port"])
        server["metrics"] = _metrics_of(values)
        options = {name: values[name] for name in _OPTIONS if name in values}
        if values.get("openai_support", "vllm") != "vllm":
            options["default_max_tokens"] = 16
        options["keeps_responses"] = "response_store" in values
        return ServerConfig(
            tuple(self._card(model, i) for i, model in enumerate(self.models) if not model.get("makes_pictures")),
            tuple(picture_card(model, values, i) for i, model in enumerate(self.models) if model.get("makes_pictures")),
            options=WireOptions(**options),
            response_limits=limits_of(values),
            log=_log_of(values),
            cors_origins=_named("corsOrigins", checked_origins, values.get("cors_origins", ())),
            allowed_hosts=_named("allowedHosts", checked_hosts, values.get("allowed_hosts", ())),
            image_hosts=_named("allowedImageHosts", checked_image_hosts, values.get("image_hosts", ())),
            **server,
        )

    def _card(self, model: Mapping[str, Any], index: int) -> ModelCard:
        """One model's card: its own settings override those of all models."""
        both = {**self.values, **model}
        check_language(model)
        engine = {name: both[name] for name in _ENGINE_FIELDS if name in both}
        if "num_blocks" not in engine:
            engine["kv_cache_bytes"] = bytes_of_gb(both.get("npu_mem_gb", -1))
        engine["host_cache_bytes"] = bytes_of_gb(both.get("cpu_mem_gb", 0)) if both.get("is_swapping", True) else 0
        for policy in ("prefill_policy", "decode_policy"):
            if engine.get(policy) == BY_PRIORITY:
                engine[policy] = 0
        if "max_queue_delay_us" in both:
            engine["max_queue_delay_s"] = both["max_queue_delay_us"] / 1e6
        if "fair_token_us" in both:
            engine["fair_token_s"] = both["fair_token_us"] / 1e6
        if (gap_ms := both.get("max_gap_ms", -1)) != -1:
            engine["max_gap_s"] = gap_ms / 1e3
        engine["max_tokens_per_step"] = _step_tokens(engine)
        if options := plugin_options(both):
            engine["plugin_options"] = options
        if both.get("backend") == "vllm":
            engine.pop("dtype", None)  # passed with the options, under vLLM's names
            engine.setdefault("crash_patience_s", VLLM_START_S)
        if "device_ids" in both and not is_plugin(both):
            engine |= device_settings(both["device_ids"], index, both.get("device", "cpu").partition(":")[0])
        engine["kv_tier"], path = _kv_tier(both), both.get("model") or ""
        name = model.get("name") or model_name(Path(path or "mock"))
        card = {field: both[field] for field in _CARD_FIELDS if field in both}
        modules, dtype = tuple(model.get("lora_modules", ())), both.get("torch_dtype", "auto")
        return ModelCard(name, EngineConfig(model=path, **engine), lora_modules=modules, dtype=dtype, **card)


def _step_tokens(engine: Mapping[str, Any]) -> int:
    """Tokens of a step: maxPrefillTokens of prompts and a decode of every sequence; at least STEP_TOKENS."""
    max_batch: int = engine.get("max_batch", MAX_BATCH)
    max_prefill: int = engine.get("max_prefill_tokens", 0)
    return max(STEP_TOKENS, max_batch + max_prefill)


def _metrics_of(values: Mapping[str, Any]) -> tuple[str, int] | None:
    """Address and port of /metrics if it has its own. Raises BadRequest when that is the public one."""
    port = values.get("metrics_port")
    if port is None or port == values.get("management_port"):
        return None
    if port == values.get("port"):
        if "management_port" in values:
            raise BadRequest("metricsPort", f"must differ from port where there is a managementPort, got {port}")
        return None
    return values.get("management_host", values.get("host", DEFAULT_HOST)), port


def _log_of(values: Mapping[str, Any]) -> LogConfig:
    files = {"max_bytes": values["log_file_mb"] * 2**20} if "log_file_mb" in values else {}
    if "log_num_old" in values:
        files["num_old"] = values["log_num_old"]
    level, path = values.get("log_level", "Warning"), values.get("log_path") or None
    python = values.get("python_log", PythonLog())
    return LogConfig(level, path, values.get("is_log_on_console", True), python, **files)


def _named(key: str, checked: Callable[[Iterable[object]], frozenset[str]], given: Iterable[object]) -> frozenset[str]:
    try:
        return checked(given)
    except ValueError as error:
        raise BadRequest(key, str(error)) from None


def _kv_tier(settings: Mapping[str, Any]) -> TierConfig | None:
    """The outer KV tier of kvPoolConfig. Raises BadRequest when there are keys but no backend."""
    given = {name.removeprefix("kv_pool_"): value for name, value in settings.items() if name.startswith("kv_pool_")}
    if not settings.get("kv_pool"):
        if given:
            raise BadRequest("kvPoolConfig.backend", 'must be "ems" when other keys of kvPoolConfig are given')
        return None
    timeout_ms, is_watched = given.pop("timeout_ms", 500), given.pop("verify", False)
    return TierConfig("kvloom.rank.tier.ems:open_tier", timeout_ms / 1000, given, is_watched)


_SERVER_FIELDS: Sequence[str] = (
    "host",
    "port",
    "max_link_num",
    "max_queued_tokens",
    "num_parsers",
    "grace_s",
    "allows_all_addresses",
    "tls",
    "api_key_hashes",
    "pid_file",
    "response_store",
    "otlp_endpoint",
    "workflow",
    "may_stop_by_get",
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
    "max_input_tokens",
    "time_limit_s",
    "tool_parser",
    "reasoning_parser",
    "generation_config",
    "stream_interval",
    "parses_special_text",
    *("prompts", "message_form"),  # of the model's files
)
_ENGINE_FIELDS: Sequence[str] = (
    "backend",
    "device",
    "dtype",
    "weight_format",
    "weight_cache",
    "world_size",
    *("kv_dtype", "snapshot_share", "draft_model"),
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
    "idle_release_s",
    "crash_patience_s",
    "run_ahead",
)
