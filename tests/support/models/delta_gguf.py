"""The delta rule's tensors of a transformers model as converters write them into GGUF files."""

from collections.abc import Iterator
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
ARCHITECTURES = ("qwen35", "qwen35moe", "qwen3next")
NAMES = {
    "in_proj_qkv.weight": "attn_qkv.weight",
    "in_proj_z.weight": "attn_gate.weight",
    "in_proj_b.weight": "ssm_beta.weight",
    "in_proj_a.weight": "ssm_alpha.weight",
    "in_proj_ba.weight": "ssm_ba.weight",
    "conv1d.weight": "ssm_conv1d.weight",
    "A_log": "ssm_a",
    "dt_bias": "ssm_dt.bias",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
}


def metadata_of(config: Any, arch: str) -> dict[str, Any]:
    """What such files say besides the sizes of attention."""
    inner = config.linear_value_head_dim * config.linear_num_value_heads
    own: dict[str, Any] = {
        "ssm__conv_kernel": config.linear_conv_kernel_dim,
        "ssm__state_size": config.linear_key_head_dim,
        "ssm__group_count": config.linear_num_key_heads,
        "ssm__time_step_rank": config.linear_num_value_heads,
        "ssm__inner_size": inner,
        "attention__recurrent_layers": [kind == "linear_attention" for kind in config.layer_types],
        "rope__dimension_count": int(config.head_dim * config.rope_parameters["partial_rotary_factor"]),
    }
    if arch != "qwen3next":
        own["rope__dimension_sections"] = [11, 11, 10, 0]
    return {f"{arch}__{key}": value for key, value in own.items()}


def converted(config: Any, arch: str, layer: str, part: str, data: Array) -> Iterator[tuple[str, Array]]:
    """(name, values) of the tensors made of `linear_attn.{part}`."""
    if part == "in_proj_qkvz.weight":
        keys, size = config.linear_num_key_heads, config.linear_key_head_dim
        values = config.linear_num_value_heads // keys * config.linear_value_head_dim
        heads = data.reshape(keys, -1, data.shape[-1])
        cut = np.split(heads, np.cumsum([size, size, values]), axis=1)
        q, k, v, z = (one.reshape(-1, data.shape[-1]) for one in cut)
        yield f"blk.{layer}.attn_qkv.weight", np.concatenate((q, k, v))
        yield f"blk.{layer}.attn_gate.weight", z
        return
    if part == "conv1d.weight":
        data = data[:, 0]
    if part == "A_log":
        data = -np.exp(data)
    if arch != "qwen3next":
        data = tiled(config, part, data)
    yield f"blk.{layer}.{NAMES[part]}", data


def tiled(config: Any, part: str, data: Array) -> Array:
    """Value heads in the order of their number within a key head, then of the key head."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    order = np.arange(values).reshape(keys, -1).T.reshape(-1)
    channels = (order[:, None] * config.linear_value_head_dim + np.arange(config.linear_value_head_dim)).reshape(-1)
    of_keys = 2 * keys * config.linear_key_head_dim
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        return np.concatenate((data[:of_keys], data[of_keys:][channels]))
    if part == "in_proj_z.weight":
        return data[channels]
    if part == "out_proj.weight":
        return data[:, channels]
    return data if part == "norm.weight" else data[order]
