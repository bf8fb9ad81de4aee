"""The tensors of Mamba-2 and of Granite's shared MLP as converters write them into GGUF files."""

from collections.abc import Iterator
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
ARCHITECTURES = ("granitehybrid", "granitemoe", "nemotron_h", "nemotron_h_moe", "mamba2", "falcon-h1")
_NAMES = {
    "in_proj.weight": "ssm_in.weight",
    "conv1d.weight": "ssm_conv1d.weight",
    "conv1d.bias": "ssm_conv1d.bias",
    "A_log": "ssm_a",
    "D": "ssm_d",
    "dt_bias": "ssm_dt.bias",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
}


_OTHERS = {  # names in the configurations of Nemotron-H, and of Mamba-2
    "mamba_n_heads": ("mamba_num_heads", "num_heads"),
    "mamba_d_head": ("mamba_head_dim", "head_dim"),
    "mamba_d_state": ("ssm_state_size", "state_size"),
    "mamba_n_groups": ("n_groups",),
    "mamba_d_conv": ("conv_kernel",),
}
_FALCON = {"feed_forward.": "mlp.", "pre_ff_layernorm.weight": "post_attention_layernorm", "final_layernorm": "norm"}
_PARTS = {  # of Nemotron-H and Mamba-2, whose layers have one branch, by the names of others
    "backbone.": "model.",
    ".embeddings.": ".embed_tokens.",
    ".norm_f.": ".norm.",
    **{f"mixer.{part}_proj.": f"self_attn.{part}_proj." for part in "qkvo"},
    **{f"mixer.{part}": f"mlp.{part}" for part in ("up_proj", "down_proj", "gate", "shared_experts", "experts")},
    ".mixer.": ".mamba.",
}


def plain(key: str) -> str:
    """The name of a tensor as Llama or Granite have it."""
    if ".mixer." in key or key.startswith("backbone.") or key.endswith(("norm_f.weight", ".embeddings.weight")):
        for theirs, ours in _PARTS.items():
            key = key.replace(theirs, ours)
    if ("feed_forward." in key and "_proj." in key) or "pre_ff_" in key or "final_layernorm" in key:
        for theirs, ours in _FALCON.items():
            key = key.replace(theirs, ours)
    parts = key.split(".")
    return ".".join([*parts[:3], "input_layernorm.weight"]) if parts[3:] == ["norm", "weight"] else key


def _of(config: Any, name: str) -> Any:
    return next(getattr(config, own) for own in (name, *_OTHERS[name]) if hasattr(config, own))


def metadata_of(config: Any, arch: str) -> dict[str, Any]:
    """What such files say besides the sizes of attention."""
    own: dict[str, Any] = {"rope__scaling__finetuned": getattr(config, "position_embedding_type", "rope") == "rope"}
    if getattr(config, "shared_intermediate_size", 0):
        own["expert_shared_feed_forward_length"] = config.shared_intermediate_size
    if {"linear_attention", "hybrid"} & set(getattr(config, "layer_types", None) or []):
        heads, size = _of(config, "mamba_n_heads"), _of(config, "mamba_d_head")
        own |= {"ssm__time_step_rank": heads, "ssm__inner_size": heads * size}
        own |= {"ssm__conv_kernel": _of(config, "mamba_d_conv"), "ssm__group_count": _of(config, "mamba_n_groups")}
        own["ssm__state_size"] = _of(config, "mamba_d_state")
    return {f"{arch}__{key}": value for key, value in own.items()}


def converted(config: Any, key: str, data: Array) -> Iterator[tuple[str, Array]]:
    """(name, values) of the tensors made of one that is called `key`; itself if it is none of these."""
    layer = key.split(".")[2]
    if ".mamba." in key:
        part = key.split(".mamba.")[1]
        if part == "conv1d.weight":
            data = data[:, 0]
        if part == "norm.weight":
            data = data.reshape(_of(config, "mamba_n_groups"), -1)
        if part in ("A_log", "D"):
            data = (-np.exp(data) if part == "A_log" else data)[:, None]
        yield f"blk.{layer}.{_NAMES[part]}", data
        return
    end = "_shexp" if config.num_local_experts else ""
    if key.endswith("shared_mlp.input_linear.weight"):
        for name, half in zip(("gate", "up"), np.split(data, 2), strict=True):
            yield f"blk.{layer}.ffn_{name}{end}.weight", half
        return
    yield f"blk.{layer}.ffn_down{end}.weight", data
