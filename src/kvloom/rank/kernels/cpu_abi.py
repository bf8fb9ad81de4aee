"""ctypes mirror of cpu/abi.h."""

import ctypes
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

INT8, INT4, BF16, INT8_32, INT8_MIN, INT5, INT6_K, IQ4, FP4, INT8_CHANNEL = range(10)
INT2, INT3_K, IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, FP4_16 = range(10, 17)
INT4_K, INT5_K, INT2_K, INT2_256, INT1, IQ2_S, IQ3_XXS, IQ3_S = range(17, 25)
NORM_QUANT, QUANT, LINEAR, ROPE_KV, ATTENTION, ROWS_NORM_QUANT, ADD_NORMED, ROUTE, EXPERTS_UP, EXPERTS_DOWN = range(10)
STATES, ADD_POSITIONS, LAYER_NORM, DELTA_RULE, SHORT_CONV, CONVOLUTION, MAMBA2 = range(10, 17)
LAYER_INPUTS, NORM_BRANCH, LATENT_KEYS, LATENT_QUERIES, LATENT_VALUES, JOIN = range(17, 23)
TO_QKV, RESIDUAL, SWIGLU, GEGLU, LOGITS, TO_BRANCH, CLAMPED, GATED_RESIDUAL, GELU, RELU2, TO_INPUTS = range(11)
FROM_ATTENTION, FROM_MLP, FROM_GATE_UP, FROM_RESIDUAL, FROM_MIXER, FROM_NORMED_MIXER, FROM_INPUTS = range(7)
FROM_QKV = 7
QUERIES, KEYS, ALL, LATENT = range(4)
NORM_HEADS, NORM_ROWS, NORM_ROTATED = range(3)
KV_BF16, KV_INT8 = range(2)
NO_UNIT, TILES, PAIRS = range(3)
NONE = OUT_OF_MEMORY = -1

_POINTER, _I32, _I64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class Shape(ctypes.Structure):
    """kvl_shape."""

    _fields_ = (
        *((name, _I32) for name in ("hidden", "intermediate", "vocab_size", "num_threads", "kv_format", "block_tiles")),
        ("block_bytes", _I64),
        *((name, ctypes.c_float) for name in ("norm_eps", "embed_scale", "residual_scale", "logit_scale")),
        *((name, ctypes.c_float) for name in ("attention_scale", "attention_softcap", "logit_softcap")),
        *((name, ctypes.c_float) for name in ("glu_limit", "glu_alpha")),
        ("query_growth", ctypes.c_float),
        ("growth_unit", _I32),
        ("sees_ahead", _I32),
        ("window_block_bytes", _I64),
    )


class Instruction(ctypes.Structure):
    """kvl_instruction."""

    _fields_ = tuple(
        (name, _I32)
        for name in (
            *("kind", "layer", "linear", "epilogue", "vector", "vector2", "source", "rope", "window", "is_gated"),
            "at",
        )
    )


class Mixture(ctypes.Structure):
    """kvl_mixture."""

    _fields_ = (
        *((name, _I32) for name in ("num_experts", "per_token", "first", "weighs_chosen")),
        *((name, _I32) for name in ("router", "router_bias", "up_bias", "down_bias", "shared")),
        *((name, _I32) for name in ("is_sigmoid", "correction", "groups", "kept_groups")),
        ("scale", ctypes.c_float),
        *((name, _I32) for name in ("group_best", "router_norm", "to_branch")),
    )


class AttentionShape(ctypes.Structure):
    """kvl_attention."""

    _fields_ = (
        *((name, _I32) for name in ("num_heads", "num_kv_heads", "key_dim", "value_dim", "projected", "value_norm")),
        ("keys_at", _I64),
        ("values_at", _I64),
        ("of_windows", _I32),
    )


class LatentShape(ctypes.Structure):
    """kvl_latent."""

    _fields_ = tuple(
        (name, _I32) for name in ("attention", "keys_at", "q_rank", "nope_dim", "rope_dim", "out_dim", "norm", "q_norm")
    )


class DeltaRuleShape(ctypes.Structure):
    """kvl_delta_rule."""

    _fields_ = (
        *((name, _I32) for name in ("num_k_heads", "num_v_heads", "k_dim", "v_dim", "conv_width", "is_tiled")),
        *((name, _I32) for name in ("decays_channels", "gates_by_sigmoid")),
        *((name, _I32) for name in ("gate_at", "beta_at", "decay_at", "conv", "decay", "decay_bias", "norm")),
        ("state_at", _I64),
    )


class ShortConvShape(ctypes.Structure):
    """kvl_short_conv."""

    _fields_ = (*((name, _I32) for name in ("channels", "conv_width", "conv")), ("state_at", _I64))


class Convolution(ctypes.Structure):
    """kvl_convolution."""

    _fields_ = (*((name, _I32) for name in ("first", "channels", "width", "conv", "bias")), ("state_at", _I64))


class Mamba2Shape(ctypes.Structure):
    """kvl_mamba2."""

    _fields_ = (
        *((name, _I32) for name in ("num_heads", "head_dim", "state_dim", "num_groups")),
        *((name, _I32) for name in ("x_at", "gate_at", "decay_at", "decay", "decay_bias", "skip", "norm")),
        *((name, ctypes.c_float) for name in ("least_step", "most_step")),
        ("state_at", _I64),
    )


class Batch(ctypes.Structure):
    """kvl_batch."""

    _fields_ = (
        ("kv", _POINTER),
        *((name, _POINTER) for name in ("ids", "pos", "qstart", "block_table", "rows")),
        *((name, _I32) for name in ("num_tokens", "num_seqs", "max_blocks", "num_rows")),
        ("tops", _POINTER),
        ("max_top", _I32),
        ("logits", _POINTER),
        ("top_values", _POINTER),
        ("top_ids", _POINTER),
        ("state_rows", _POINTER),
        ("num_states", _I32),
        ("states", _POINTER),
        ("adapters", _POINTER),
        ("types", _POINTER),
        ("choices", _POINTER),
        ("tokens", _POINTER),
        ("states_memory", _POINTER),
        ("state_floats", _I64),
        ("places", _POINTER),
        ("layer_rows", _POINTER),
        ("window_kv", _POINTER),
        ("windows", _POINTER),
    )


class FileNumbers(ctypes.Structure):
    """kvl_numbers."""

    _fields_ = (
        *((name, _POINTER) for name in ("numbers", "scales", "minimums")),
        ("run", _I64),
        *((name, _POINTER) for name in ("scale_factors", "minimum_factors")),
    )


class DrawRules(ctypes.Structure):
    """kvl_draw_rules."""

    _fields_ = (*((name, ctypes.c_float) for name in ("temperature", "top_p", "min_p")), ("point", ctypes.c_double))


SIGNATURES: Mapping[str, tuple[Any, list[Any]]] = {  # function -> (result, arguments)
    "kvl_isa": (ctypes.c_char_p, []),
    "kvl_use": (_I32, [_POINTER, _I32]),
    "kvl_new": (_POINTER, [ctypes.POINTER(Shape)]),
    "kvl_free": (None, [_POINTER]),
    "kvl_add_linear": (_I32, [_POINTER, _I64, _I64, _I32]),
    "kvl_share_linear": (_I32, [_POINTER, _POINTER, _I32]),
    "kvl_set_format": (_I32, [_POINTER, _I32, _I64, _I32]),
    "kvl_add_vector": (_I32, [_POINTER, _POINTER, _I64]),
    "kvl_add_mixture": (_I32, [_POINTER, ctypes.POINTER(Mixture)]),
    "kvl_add_attention": (_I32, [_POINTER, ctypes.POINTER(AttentionShape)]),
    "kvl_add_latent": (_I32, [_POINTER, ctypes.POINTER(LatentShape)]),
    "kvl_add_delta_rule": (_I32, [_POINTER, ctypes.POINTER(DeltaRuleShape)]),
    "kvl_add_short_conv": (_I32, [_POINTER, ctypes.POINTER(ShortConvShape)]),
    "kvl_add_convolution": (_I32, [_POINTER, ctypes.POINTER(Convolution)]),
    "kvl_add_mamba2": (_I32, [_POINTER, ctypes.POINTER(Mamba2Shape)]),
    "kvl_allocate": (_I64, [_POINTER]),
    "kvl_arena_bytes": (_I64, [_POINTER, _I32]),
    "kvl_arena": (_POINTER, [_POINTER, _I32]),
    "kvl_adopt": (None, [_POINTER, _POINTER]),
    "kvl_fill_f32": (None, [_POINTER, _I32, _POINTER, _I64, _I64, _I32]),
    "kvl_fill_numbers": (None, [_POINTER, _I32, ctypes.POINTER(FileNumbers), _I64, _I64, _I32]),
    "kvl_round_bf16": (None, [_POINTER, _I64, _POINTER]),
    "kvl_adapter_new": (_I32, [_POINTER]),
    "kvl_adapter_add": (
        _I64,
        [_POINTER, _I32, _I32, _POINTER, _POINTER, _I64, _I64, ctypes.c_float, _I64, _I32],
    ),
    "kvl_adapter_free": (None, [_POINTER, _I32]),
    "kvl_set_embed": (None, [_POINTER, _POINTER, _I32]),
    "kvl_add_rope": (_I32, [_POINTER, _POINTER, _I32]),
    "kvl_set_program": (_I32, [_POINTER, ctypes.POINTER(Instruction), _I32]),
    "kvl_step": (_I32, [_POINTER, ctypes.POINTER(Batch)]),
    "kvl_step_again": (_I32, [_POINTER, ctypes.POINTER(Batch)]),
    "kvl_draw": (_I32, [_POINTER, _I64, ctypes.POINTER(DrawRules)]),
    "kvl_uniform": (ctypes.c_double, [ctypes.c_uint64, ctypes.c_uint64]),
    "kvl_probe_bandwidth": (ctypes.c_double, [_POINTER, _I64, _I32]),
}


@cache
def load(path: Path) -> ctypes.CDLL:
    """The library with its functions' types declared. Calls release the interpreter lock, and raise MemoryError."""
    lib = ctypes.CDLL(str(path))
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
        if result in (_I32, _I64, ctypes.c_double):
            function.errcheck = _checked
    return lib


def _checked(result: Any, function: Any, arguments: Any) -> Any:
    """`result`, unless it says that there was not enough memory. Raises MemoryError."""
    if result == OUT_OF_MEMORY:
        raise MemoryError("there is not enough memory left for it")
    return result
