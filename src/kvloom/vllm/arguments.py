"""Translates an EngineConfig into arguments of vLLM's command line. Does not need vLLM."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvloom.checkpoints.files import read_object
from kvloom.contract.config import EngineConfig, TierConfig
from kvloom.contract.errors import BadRequest, ModelError

# options that EngineConfig, or their use here, determines
_OURS = {
    "model": "the model of the command line or of config.json",
    "tokenizer": "the model's folder",
    "skip_tokenizer_init": "grammars need the tokenizer",
    "served_model_name": "--served-model-name of kvloom",
    "max_logprobs": "what the dialects allow",
}
_MAX_LOGPROBS = 20
_LENGTHS = ("max_position_embeddings", "n_positions", "seq_length")
CONNECTOR = {
    "kv_connector": "EMSConnector",
    "kv_connector_module_path": "ems.integration.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


def arguments_of(config: EngineConfig) -> list[str]:
    """vLLM's arguments. `config.plugin_options`, under vLLM's names, override those made from the rest. Raises
    BadRequest.
    """
    options = config.plugin_options
    for name, instead in _OURS.items():
        if name in options:
            raise BadRequest(f"vllm.{name}", f"is not to be given; it is {instead}")
    if "kv_transfer_config" in options and config.kv_tier is not None:
        raise BadRequest("vllm.kv_transfer_config", "is made of kvPoolConfig, which is given too")
    made: dict[str, Any] = {
        "model": config.model,
        "served_model_name": Path(config.model).name,  # a label of vLLM's metrics, which should not be a path
        "max_logprobs": _MAX_LOGPROBS,
        "max_num_seqs": config.max_batch,
        "scheduling_policy": "priority",
        "structured_outputs_config": {"backend": "guidance"},  # llguidance, for which kvloom writes grammars
    }
    if config.max_seq_len is not None:
        made["max_model_len"] = min(config.max_seq_len, _longest(Path(config.model)) or config.max_seq_len)
    if config.max_prefill_tokens:
        made["max_num_batched_tokens"] = max(config.max_prefill_tokens, config.max_batch)
    if config.world_size > 1:
        made["tensor_parallel_size"] = config.world_size
    if config.kv_cache_bytes is not None:
        made["kv_cache_memory_bytes"] = config.kv_cache_bytes
    if config.kv_tier is not None:
        made["kv_transfer_config"] = {**CONNECTOR, "kv_connector_extra_config": _extra(config.kv_tier)}
    return [word for name, value in {**made, **options}.items() for word in _words(name, value)]


def _extra(tier: TierConfig) -> dict[str, Any]:
    """EMSConnector's settings from kvPoolConfig."""
    names = ("socket", "access_id", "access_key_file")
    given = {name: tier.options[name] for name in names if tier.options.get(name)}
    return {**given, "timeout_ms": round(1000 * tier.timeout_s)}


def _words(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    if isinstance(value, Mapping | list):
        value = json.dumps(value)
    return [] if value is None else [f"{flag}={value}"]


def _longest(folder: Path) -> int | None:
    """The model's context length from its config.json; None = not given."""
    try:
        found = read_object(folder / "config.json")
        found = {**found, **found.get("text_config", {})}
    except (ModelError, TypeError):
        return None
    return next((found[name] for name in _LENGTHS if isinstance(found.get(name), int)), None)
