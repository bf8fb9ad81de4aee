"""The tensors of Mamba-2 and of Granite's shared MLP as converters write them into GGUF files."""

from collections.abc import Iterator
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
ARCHITECTURES = ("granitehybrid", "granitemoe")
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


def metadata_of(config: Any, arch: str) -> dict[str, Any]:
    """What such files say besides the sizes of attention."""
    own: dict[str, Any] = {"rope__scaling__finetuned": getattr(config, "position_embedding_type", "rope") == "rope"}
    if getattr(config, "shared_intermediate_size", 0):
        own["expert_shared_feed_forward_length"] = config.shared_intermediate_size
    if "linear_attention" in (getattr(config, "layer_types", None) or []):
        own |= {
            "ssm__conv_kernel": config.mamba_d_conv,
            "ssm__state_size": config.mamba_d_state,
            "ssm__group_count": config.mamba_n_groups,
            "ssm__time_step_rank": config.mamba_n_heads,
            "ssm__inner_size": config.mamba_n_heads * config.mamba_d_head,
        }
    return {f"{arch}__{key}": value for key, value in own.items()}


def converted(config: Any, key: str, data: Array) -> Iterator[tuple[str, Array]]:
    """(name, values) of the tensors made of one that is called `key`; itself if it is none of these."""
    layer = key.split(".")[2]
    if ".mamba." in key:
        part = key.split(".mamba.")[1]
        if part == "conv1d.weight":
            data = data[:, 0]
        if part == "norm.weight":
            data = data.reshape(config.mamba_n_groups, -1)
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
