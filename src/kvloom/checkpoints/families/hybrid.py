"""Layers with a state among those with attention: which they are, and their sizes, from a configuration."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvloom.checkpoints.families.mixers import DeltaRule, KimiDelta, Mamba2, Recurrent, ShortConv
from kvloom.checkpoints.families.spec import Layer
from kvloom.checkpoints.families.values import count, flag, short
from kvloom.contract.errors import ModelError

FULL, LINEAR = "full_attention", "linear_attention"
SINGLE = (LINEAR, FULL, "mlp", "moe")  # layers of one branch
_OLDER = {"mamba": LINEAR, "attention": FULL}  # names of the same before transformers 5
_TAGGED, _ENDLESS = {"__float__": "Infinity"}, math.inf  # as transformers writes it
MAX_WIDTH = 8  # tokens of a convolution


def hybrid_layers(layers: Sequence[Layer], config: Mapping[str, Any], kind: str, mixer: Recurrent) -> tuple[Layer, ...]:
    """`layers`, of which those that layer_types calls `kind` have `mixer`. Without it those of full_attn_idxs have
    attention, or every full_attention_interval-th; GGUF files say it in recurrent_layers. Raises ModelError.
    """
    types, flags, listed = (config.get(key) for key in ("layer_types", "recurrent_layers", "full_attn_idxs"))
    if types is not None:
        types = older_names(types)
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


def single_layers(layers: Sequence[Layer], config: Mapping[str, Any], mixer: Recurrent) -> tuple[Layer, ...]:
    """`layers`, of which each has the one branch that layer_types names. Raises ModelError."""
    types = older_names(config.get("layer_types"))
    if not isinstance(types, list) or len(types) != len(layers) or not set(types) <= set(SINGLE):
        problem = f"must name {len(layers)} layers, each one of {', '.join(SINGLE)}, got {short(types)}"
        raise ModelError(f"configuration: layer_types {problem}")
    own = {
        LINEAR: lambda layer: replace(layer, mixer=mixer, has_mlp=False),
        FULL: lambda layer: replace(layer, has_mlp=False),
        "mlp": lambda layer: replace(layer, mixer=None),
        "moe": lambda layer: replace(layer, mixer=None, has_experts=True),
    }
    return tuple(own[name](layer) for layer, name in zip(layers, types, strict=True))


def older_names(types: object) -> object:
    """layer_types with the names that transformers has had for them since version 5."""
    return [_OLDER.get(name, name) for name in types] if isinstance(types, list) else types


def short_conv(config: Mapping[str, Any]) -> ShortConv:
    """Raises ModelError."""
    return ShortConv(count(config, "hidden_size"), _width(config, "conv_L_cache"))


_MAMBA_KEYS = {"mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias"}
_MAMBA_KEYS |= {"rms_norm_eps": "layer_norm_epsilon"}


def own_keys(config: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """What a configuration calls otherwise; `keys`: theirs by ours, beside those that all of Mamba's kin have."""
    named = {**_MAMBA_KEYS, **keys}.items()
    return {ours: config[theirs] for ours, theirs in named if theirs in config and ours not in config}


def mamba2(config: Mapping[str, Any]) -> Mamba2:
    """Raises ModelError."""
    num_heads, groups = count(config, "mamba_n_heads"), count(config, "mamba_n_groups", 1)
    size = config.get("mamba_d_ssm")
    size = (
        count(config, "mamba_expand") * count(config, "hidden_size") if size is None else count(config, "mamba_d_ssm")
    )
    if size % num_heads or num_heads % groups:
        problem = f"{size} channels in {num_heads} heads (mamba_n_heads) in {groups} groups (mamba_n_groups)"
        raise ModelError(f"configuration: {problem} cannot be")
    if config.get("mamba_d_head") not in (None, "auto", size // num_heads):
        raise ModelError(
            f"configuration: mamba_d_head must be {size // num_heads}, got {short(config['mamba_d_head'])}"
        )
    if flag(config, "mamba_proj_bias"):
        raise ModelError("Mamba-2 with mamba_proj_bias is not supported")
    return Mamba2(
        num_heads,
        size // num_heads,
        count(config, "mamba_d_state"),
        groups,
        _width(config, "mamba_d_conv"),
        flag(config, "mamba_conv_bias", default=True),
        flag(config, "mamba_rms_norm", default=True),
        *_limits(config.get("time_step_limit")),
    )


def mamba2_names(module: str) -> dict[str, str]:
    """Of a mixer's tensors in folders, by the name of its module in a layer."""
    tensors = {
        "conv": "conv1d.weight",
        "conv_bias": "conv1d.bias",
        "decay": "A_log",
        "decay_bias": "dt_bias",
        "skip": "D",
    }
    tensors |= {"mamba_in": "in_proj.weight", "out_norm": "norm.weight", "out": "out_proj.weight"}
    return {name: f"{module}.{tensor}" for name, tensor in tensors.items()}


def _limits(given: object) -> tuple[float, float]:
    """Bounds of Mamba-2's step. Raises ModelError."""
    pair = [0.0, math.inf] if given is None else given
    numbers = [_ENDLESS if one == _TAGGED else one for one in pair] if isinstance(pair, list | tuple) else []
    if (
        len(numbers) != 2
        or not all(isinstance(one, int | float) for one in numbers)
        or not 0 <= numbers[0] <= numbers[1]
    ):
        raise ModelError(f"configuration: time_step_limit must be two numbers in order, got {short(given)}")
    return float(numbers[0]), float(numbers[1])


def _width(config: Mapping[str, Any], key: str) -> int:
    """Tokens of a convolution."""
    width = count(config, key)
    if not 2 <= width <= MAX_WIDTH:
        raise ModelError(f"configuration: {key} must be 2 to {MAX_WIDTH}, got {width}")
    return width


def kimi_delta(config: Mapping[str, Any]) -> KimiDelta:
    """Raises ModelError."""
    width = _width(config, "linear_conv_kernel_dim")
    return KimiDelta(count(config, "linear_num_heads"), count(config, "linear_head_dim"), width)


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
