"""Positions and windows of each layer from a configuration: sliding windows, rotary embeddings, layers without any."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvloom.checkpoints.families.mixers import Attention, Rope
from kvloom.checkpoints.families.rope import ROPE_FIELDS, build_rope
from kvloom.checkpoints.families.spec import Layer
from kvloom.checkpoints.families.values import count, flag, positive, short
from kvloom.checkpoints.fields import unknown_field
from kvloom.contract.errors import ModelError

LOCAL, FULL = "sliding_attention", "full_attention"


def sees_ahead(config: Mapping[str, Any]) -> bool:
    """Whether tokens attend to later ones."""
    return flag(config, "use_bidirectional_attention") or not flag(config, "is_causal", default=True)


def layers_of(config: Mapping[str, Any], sizes: Attention, max_seq_len: int) -> tuple[Layer, ...]:
    """The layers of a configuration, with the heads of `sizes`. Keys are Hugging Face's, and some that families give as
    defaults:
    `window_needs_switch`: sliding_window only counts if use_sliding_window is true; `rope_local_unscaled`: rope_scaling
    does not apply to layers with a window; `rope_truncate`: YaRN's truncate if rope_scaling has none;
    `rope_in_windows`: where some layers have a window, the others have no rotary embedding; `rope_own_fields`: of
    rope_parameters, that the family reads; `global_head_dim`, `num_global_key_value_heads`: of layers without a window.

    Raises ModelError.
    """
    num_layers = count(config, "num_hidden_layers")
    windows = _windows(config, num_layers)
    head_dim = count(config, "global_head_dim", sizes.head_dim)
    kv_heads = count(config, "num_global_key_value_heads", sizes.num_kv_heads)
    if sizes.num_heads % kv_heads:
        problem = f"is no multiple of num_global_key_value_heads {kv_heads}"
        raise ModelError(f"num_attention_heads {sizes.num_heads} {problem}")
    of_kind = {LOCAL: sizes, FULL: replace(sizes, head_dim=head_dim, num_kv_heads=kv_heads)}
    ropes = {kind: _rope(config, kind, own.head_dim, max_seq_len) for kind, own in of_kind.items()}
    uses_rope = _uses_rope(config, num_layers)
    if config.get("rope_in_windows") and config.get("sliding_window") is not None:
        uses_rope = [window is not None for window in windows]
    kinds = [LOCAL if window else FULL for window in windows]
    return tuple(
        Layer(replace(of_kind[kind], rope=ropes[kind] if is_used else None, window=window))
        for kind, window, is_used in zip(kinds, windows, uses_rope, strict=True)
    )


def _windows(config: Mapping[str, Any], num_layers: int) -> list[int | None]:
    """Tokens that a query of each layer attends to, itself included; None = all."""
    if config.get("sliding_window") is None:
        return [None] * num_layers
    if config.get("window_needs_switch") and not flag(config, "use_sliding_window"):
        return [None] * num_layers
    window = count(config, "sliding_window")
    if flag(config, "use_bidirectional_attention"):  # Gemma 3's: on both sides together, plus the token itself
        window = window // 2 + 1
    elif sees_ahead(config):
        raise ModelError("configuration: is_causal false with a sliding_window is not supported")
    return [window if is_local else None for is_local in _local(config, num_layers)]


def _local(config: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Which layers have the window: by name, by a repeating pattern, or all from one on."""
    types, pattern = config.get("layer_types"), config.get("sliding_window_pattern")
    if types is not None:
        if not isinstance(types, list) or len(types) != num_layers or any(kind not in (LOCAL, FULL) for kind in types):
            raise ModelError(
                f"configuration: layer_types must name {num_layers} layers, each {LOCAL} or {FULL}, got {short(types)}"
            )
        return [kind == LOCAL for kind in types]
    if isinstance(pattern, list):
        if len(pattern) != num_layers:
            raise ModelError(
                f"configuration: sliding_window_pattern must name {num_layers} layers, got {short(pattern)}"
            )
        return [bool(is_local) for is_local in pattern]
    if pattern is not None:
        period = count(config, "sliding_window_pattern")
        return [(index + 1) % period > 0 for index in range(num_layers)]
    first = config.get("max_window_layers", 0)
    if not isinstance(first, int):
        raise ModelError(f"configuration: max_window_layers must be a whole number, got {short(first)}")
    return [index >= first for index in range(num_layers)]


def _uses_rope(config: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Which layers use RoPE: no_rope_layers has a 1 for each that does (sic); with an interval every n-th does not."""
    listed = config.get("no_rope_layers")
    if listed:
        if not isinstance(listed, list) or len(listed) != num_layers:
            raise ModelError(f"configuration: no_rope_layers must name {num_layers} layers, got {short(listed)}")
        return [bool(is_used) for is_used in listed]
    if config.get("no_rope_layer_interval") is None:
        return [True] * num_layers
    interval = count(config, "no_rope_layer_interval")
    return [(index + 1) % interval > 0 for index in range(num_layers)]


def _rope(config: Mapping[str, Any], kind: str, head_dim: int, max_seq_len: int) -> Rope:
    scaling = _scaling(config)
    base = positive(config, "rope_theta", 10000.0)
    if LOCAL in scaling or FULL in scaling:  # one for each kind of layers
        scaling = scaling.get(kind) or {}
        if not isinstance(scaling, Mapping):
            raise ModelError(f"configuration: rope_parameters of {kind} must be an object, got {short(scaling)}")
    elif kind == LOCAL and config.get("rope_local_unscaled"):
        scaling, base = {}, positive(config, "rope_local_base_freq", positive(scaling, "rope_theta", base))
    name = unknown_field(scaling, (*ROPE_FIELDS, *config.get("rope_own_fields", ())))
    if name is not None:
        raise ModelError(f"configuration: {name[:80]} of rope_parameters is not supported, got {short(scaling[name])}")
    theta = positive(scaling, "rope_theta", base)
    keys = {"original_max_position_embeddings": "original_max_position_embeddings", "truncate": "rope_truncate"}
    context = {key: config[own] for key, own in keys.items() if own in config}
    try:
        scaling = {**context, **{key: value for key, value in scaling.items() if value is not None}}
        return build_rope(_rotated(config, scaling, head_dim), theta, scaling, max_seq_len)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ModelError(f"configuration: rope_theta and rope_scaling cannot be used: {error}") from None


def _scaling(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """rope_parameters, or rope_scaling as it was called; one that says something else beside the other is refused:
    transformers takes it in place of the other, and so loses the other's rope_theta.
    """
    given = [config.get(name) or {} for name in ("rope_parameters", "rope_scaling")]
    for one in given:
        if not isinstance(one, Mapping):
            raise ModelError(f"configuration: rope_scaling must be an object, got {short(one)}")
    parameters, scaling = given
    if not parameters:
        return scaling
    for name, value in scaling.items():
        own = "rope_type" if name == "type" else name
        if value is not None and value != parameters.get(own, parameters.get("type") if own == "rope_type" else None):
            raise ModelError(
                f"configuration: {name[:80]} of rope_scaling is {short(value)}, which rope_parameters does not say; "
                "move what holds into rope_parameters, beside its rope_theta"
            )
    return parameters


def _rotated(config: Mapping[str, Any], scaling: Mapping[str, Any], head_dim: int) -> int:
    """Dimensions of a head that are rotated, an even number."""
    if scaling.get("rope_type") == "proportional":  # those beyond the part have frequencies of 0
        return head_dim
    part = positive(scaling, "partial_rotary_factor", positive(config, "partial_rotary_factor", 1.0))
    dim = count(config, "rotary_dim", max(1, int(head_dim * part)))
    if dim % 2 or dim > head_dim:
        raise ModelError(
            f"rotary embedding of {dim} dimensions of a head of {head_dim}: an even part of it is supported"
        )
    return dim
