"""Options of plug-in engines under their own names: `engineOptions`, and vLLM's options that have keys of their own."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvloom.contract.config import BACKENDS
from kvloom.contract.errors import BadRequest
from kvloom.server.config.key import Key

VLLM_START_S = 600.0  # default time that requests wait for a vLLM that died: it takes minutes to start
_CHOICES = ("mp", "ray", "uni", "external_launcher")
PLUGIN_KEYS: Mapping[str, Key] = {
    "tensorParallelSize": Key(
        int, "vLLM: devices that share each layer", 1, 1024, setting="tensor_parallel_size",
        flag="--tensor-parallel-size",
    ),
    "pipelineParallelSize": Key(
        int, "vLLM: stages of some layers each", 1, 1024, setting="pipeline_parallel_size",
        flag="--pipeline-parallel-size",
    ),
    "distributedExecutorBackend": Key(
        str, "vLLM: what starts its workers", choices=_CHOICES, setting="distributed_executor_backend",
        flag="--distributed-executor-backend", help="vLLM: mp, ray, uni: starts workers.",
    ),
    "quantization": Key(
        str, "vLLM: how the weights are quantised", setting="quantization", longest=64, flag="--quantization"
    ),
    "maxModelLen": Key(
        int, "vLLM: longest prompt and answer together; before maxSeqLen", 2, setting="max_model_len",
        flag="--max-model-len", help="vLLM: longest prompt and answer together.",
    ),
    "engineOptions": Key(dict, "options of a back end that is a plug-in, by its own names", setting="engine_options"),
}  # fmt: skip
SETTINGS = {key.setting: name for name, key in PLUGIN_KEYS.items() if name != "engineOptions"}
# settings without effect with vLLM, whose own scheduler decides
_IDLE = (
    "block_size", "device_ids", "max_preempt", "prealloc_blocks", "prefill_policy", "decode_policy",
    "prefill_ms_per_seq", "decode_ms_per_seq", "is_selecting", "is_continuous", "max_queue_delay_us",
    "max_prefill_batch", "cpu_mem_gb", "is_swapping",
)  # fmt: skip


def is_plugin(model: Mapping[str, Any]) -> bool:
    """Whether a plug-in engine runs the model."""
    return model.get("backend", "auto") not in BACKENDS


def plugin_options(model: Mapping[str, Any]) -> dict[str, Any]:
    """EngineConfig.plugin_options of a model's settings. Raises BadRequest that names an option its back end lacks."""
    backend = model.get("backend", "auto")
    named = {name: model[name] for name in SETTINGS if name in model}
    if named and backend != "vllm":
        raise BadRequest(SETTINGS[next(iter(named))], f"is an option of backend vllm; this model has {backend!r}")
    given = {**named, **model.get("engine_options", {})}
    if model.get("engine_options") and not is_plugin(model):
        raise BadRequest("engineOptions", f"are for a back end that is a plug-in; this model has {backend!r}")
    if backend == "vllm":
        if "dtype" in model:
            given.setdefault("dtype", model["dtype"])
        if model.get("lora_modules") or model.get("lora_root"):
            given.setdefault("enable_lora", True)
    return given


def idle_notes(models: Sequence[Mapping[str, Any]], paths: Mapping[str, str]) -> Iterator[str]:
    """One sentence that names the file's keys without effect with vLLM, if vLLM is used and there are any."""
    idle = [paths[name].rpartition(".")[2] for name in _IDLE if name in paths]
    if idle and any(model.get("backend") == "vllm" for model in models):
        yield f"without effect with backend vllm, which schedules by itself: {', '.join(idle)}"


def option_of(text: str) -> tuple[str, Any]:
    """Name and value of "key=value" for --vllm: the value is parsed as JSON if possible, else a text. Raises
    BadRequest.
    """
    name, is_pair, value = text.partition("=")
    name = name.strip().removeprefix("--").replace("-", "_")
    if not (is_pair and name.isidentifier()):
        raise BadRequest("vllm", f"must be KEY=VALUE, got {json.dumps(text)}")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value
