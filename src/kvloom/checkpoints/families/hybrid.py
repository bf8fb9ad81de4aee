"""Layers with a state among those with attention: which they are, and their sizes, from a configuration."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvloom.checkpoints.families.mixers import DeltaRule, Recurrent, ShortConv
from kvloom.checkpoints.families.spec import Layer
from kvloom.checkpoints.families.values import count, short
from kvloom.contract.errors import ModelError

FULL = "full_attention"
MAX_WIDTH = 8  # tokens of a convolution


def hybrid_layers(layers: Sequence[Layer], config: Mapping[str, Any], kind: str, mixer: Recurrent) -> tuple[Layer, ...]:
    """`layers`, of which those that layer_types calls `kind` have `mixer`. Without it those of full_attn_idxs have
    attention, or every full_attention_interval-th; GGUF files say it in recurrent_layers. Raises ModelError.
    """
    types, flags, listed = (config.get(key) for key in ("layer_types", "recurrent_layers", "full_attn_idxs"))
    if types is not None:
        if not isinstance(types, list) or len(types) != len(layers) or not set(types) <= {kind, FULL}:
            problem = f"must name {len(layers)} layers, each {kind} or {FULL}, got {short(types)}"
            raise ModelError(f"configuration: layer_types {problem}")
        flags = [name == kind for name in types]
    elif isinstance(listed, list):
        flags = [index not in listed for index in range(len(layers))]
    if flags is None:
        interval = count(config, "full_attention_interval", 1)
        flags = [(index + 1) % interval > 0 for index in range(len(layers))]
    if not isinstance(flags, list) or len(flags) < len(layers):
        raise ModelError(f"configuration: recurrent_layers must name {len(layers)} layers, got {short(flags)}")
    return tuple(replace(layer, mixer=mixer) if own else layer for layer, own in zip(layers, flags, strict=False))


def short_conv(config: Mapping[str, Any]) -> ShortConv:
    """Raises ModelError."""
    return ShortConv(count(config, "hidden_size"), _width(config, "conv_L_cache"))


def _width(config: Mapping[str, Any], key: str) -> int:
    """Tokens of a convolution."""
    width = count(config, key)
    if not 2 <= width <= MAX_WIDTH:
        raise ModelError(f"configuration: {key} must be 2 to {MAX_WIDTH}, got {width}")
    return width


def delta_rule(config: Mapping[str, Any]) -> DeltaRule:
    """Raises ModelError."""
    num_k_heads, num_v_heads = count(config, "linear_num_key_heads"), count(config, "linear_num_value_heads")
    if num_v_heads % num_k_heads:
        raise ModelError(f"linear_num_value_heads {num_v_heads} is no multiple of linear_num_key_heads {num_k_heads}")
    inner = config.get("linear_inner_size")  # GGUF's, of all heads
    v_dim = count(config, "linear_value_head_dim" if inner is None else "linear_inner_size")
    if inner is not None and v_dim % num_v_heads:
        raise ModelError(f"configuration: {v_dim} channels cannot be shared by {num_v_heads} value heads")
    v_dim = v_dim if inner is None else v_dim // num_v_heads
    width = _width(config, "linear_conv_kernel_dim")
    return DeltaRule(num_k_heads, num_v_heads, count(config, "linear_key_head_dim"), v_dim, width)
