"""vLLM's routes for operators: version, load, configuration, prefix cache, sleep."""

import os
import platform
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from kvloom.contract.errors import BadRequest, ServingError
from kvloom.server.dialects.sglang.server import server_facts
from kvloom.server.errors import ErrorReply, openai_reply
from kvloom.server.http.reply import Endpoint, HttpRequest, Reply
from kvloom.server.serving.registry import Models
from kvloom.server.serving.service import GenerationService
from kvloom.server.serving.sleeping import LEVELS

_FLAGS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
_TAGS = ("weights", "kv_cache")


class VllmServer:
    """`config`: the result of config_view. Effects are on all models, or on the one that `?model=` names."""

    def __init__(self, models: Models, config: Mapping[str, Any], number: str) -> None:
        self._models, self._config, self._number = models, config, number

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        def get(path: str, answer: Callable[[HttpRequest], Any], summary: str) -> Endpoint:
            return Endpoint("GET", path, answer, summary, is_management=True, is_early=path == "/version")

        def post(path: str, answer: Callable[[HttpRequest], Any], summary: str) -> Endpoint:
            return Endpoint("POST", path, answer, summary, is_management=True)

        return (
            get("/version", self.version, "The server's version"),
            get("/load", self.load, "Requests that are served or wait"),
            get("/server_info", self.server_info, "Configuration and environment; ?config_format=text or json"),
            post("/reset_prefix_cache", self.reset_prefix_cache, "Forget cached prefixes; ?reset_running_requests="),
            post("/sleep", self.sleep, "Give the memory back; ?level=1 or 2, ?mode=wait or abort"),
            post("/wake_up", self.wake_up, "Load the weights again"),
            get("/is_sleeping", self.is_sleeping, "Whether a model sleeps"),
        )

    def error_reply(self, error: ServingError) -> ErrorReply:
        return openai_reply(error)

    async def version(self, request: HttpRequest) -> Reply:
        return _json({"version": self._number})

    async def load(self, request: HttpRequest) -> Reply:
        return _json({"server_load": self._models.num_active})

    async def server_info(self, request: HttpRequest) -> Reply:
        """Of the first model, by vLLM's names and by SGLang's, which has this route too; all that is configured stands
        beside it. Raises BadRequest."""
        form = request.query.get("config_format", "text")
        if form not in ("text", "json"):
            raise BadRequest("config_format", f"must be text or json, got {form!r}")
        config = {**_vllm_config(self._models.default), "kvloom_config": dict(self._config)}
        text = ", ".join(f"{name}={value}" for name, value in config.items())
        variables = {name: value for name, value in os.environ.items() if name.startswith("MIES_")}
        info = {"vllm_config": text if form == "text" else config, "vllm_env": variables, "system_env": self._system()}
        return _json({**server_facts(self._models.default, self._number), **info})

    def _system(self) -> dict[str, Any]:
        return {
            "kvloom_version": self._number,
            "torch_version": _version_of("torch"),
            "python_version": platform.python_version(),
            "python_platform": platform.platform(),
            "libc_version": "-".join(platform.libc_ver()),
            "cpu_info": f"{platform.machine()}, {os.cpu_count()} CPUs",
        }

    async def reset_prefix_cache(self, request: HttpRequest) -> Reply:
        """Reset the prefix cache, not the KV pool, whose blocks stay. Raises BadRequest, NotFound, Unavailable."""
        preempts, is_external = _flag(request, "reset_running_requests"), _flag(request, "reset_external")
        services = self._chosen(request)
        if is_external and any(service.card.engine.kv_tier is not None for service in services):
            raise BadRequest(
                "reset_external",
                "is not possible: other servers share the KV pool; its control plane evicts, "
                "POST /v1/nodes/{id}/blocks:evict",
            )
        for service in services:
            await service.engine.reset_prefix_cache(preempts)
        return _json({"success": True})

    async def sleep(self, request: HttpRequest) -> Reply:
        """Answers when the memory is given back. Raises BadRequest, NotFound, Unavailable."""
        level = request.query.get("level", "1")
        if level not in map(str, LEVELS):
            raise BadRequest("level", f"must be 1 (the same weights come back) or 2 (others may), got {level!r}")
        mode = request.query.get("mode", "wait")
        if mode not in ("wait", "abort"):
            raise BadRequest("mode", f"must be wait (running requests finish) or abort (they end now), got {mode!r}")
        for service in self._chosen(request):
            await service.sleeper.sleep(int(level), mode == "abort")
        return Reply()

    async def wake_up(self, request: HttpRequest) -> Reply:
        """Weights and KV cache come together, whichever tag is asked for. Raises BadRequest, NotFound, ModelError."""
        tag = request.query.get("tags")
        if tag is not None and tag not in _TAGS:
            raise BadRequest("tags", f"must be weights or kv_cache, got {tag!r}")
        for service in self._chosen(request):
            await service.sleeper.wake()
        return Reply()

    async def is_sleeping(self, request: HttpRequest) -> Reply:
        """Raises NotFound."""
        return _json({"is_sleeping": any(service.sleeper.level for service in self._chosen(request))})

    def _chosen(self, request: HttpRequest) -> Iterable[GenerationService]:
        """Raises NotFound."""
        name = request.query.get("model")
        return list(self._models) if name is None else [self._models.base(name)]


def _vllm_config(service: GenerationService) -> dict[str, Any]:
    """The parts of vLLM's configuration that have a counterpart here."""
    config, info = service.card.engine, service.engine.info
    return {
        "model_config": {
            "model": config.model,
            "served_model_name": service.name,
            "max_model_len": service.engine.max_seq_len,
            "dtype": service.card.dtype,
            "seed": config.seed,
        },
        "cache_config": {
            "block_size": info.block_size,
            "cache_dtype": config.kv_dtype,
            "enable_prefix_caching": config.enable_prefix_cache,
            "num_gpu_blocks": info.num_blocks,
            "num_cpu_blocks": info.num_host_blocks,
        },
        "parallel_config": {"tensor_parallel_size": config.world_size},
        "scheduler_config": {
            "max_num_seqs": config.max_batch,
            "max_num_batched_tokens": config.max_tokens_per_step,
        },
        "device_config": {"device": config.device, "backend": info.backend},
    }


def _flag(request: HttpRequest, name: str) -> bool:
    text = request.query.get(name, "false").lower()
    if text not in _FLAGS:
        raise BadRequest(name, f"must be true or false, got {text!r}")
    return _FLAGS[text]


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _json(value: Any) -> Reply:
    return Reply(msgspec.json.encode(value))
