"""Qwen3.5 and Qwen3-Next: three of four layers have the gated delta rule, the others attention with a gated output.

Folders hold the weights of norms minus one, and Qwen3-Next's the rows of the delta rule's projections by key head. GGUF
files of Qwen3.5 have value heads in tiled order.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvloom.checkpoints.families.expert_layers import Mixture
from kvloom.checkpoints.families.family import Family
from kvloom.checkpoints.families.hybrid import delta_rule
from kvloom.checkpoints.families.mixers import DeltaRule

_EXPERTS = Mixture(shared="weighted")
_GGUF_NAMES = {"mlp_norm": "post_attention_norm.weight"}


def tiled(config: Mapping[str, Any]) -> DeltaRule:
    """Of GGUF files of Qwen3.5."""
    return replace(delta_rule(config), is_tiled=True)


QWEN3_5 = Family(
    "qwen3_5",
    qk_norm="head",
    norm_offset=1.0,
    gates_attention=True,
    fused=("q_gated",),
    recurrent=delta_rule,
    recurrent_kind="linear_attention",
    has_guess_head=True,
    gguf_names=_GGUF_NAMES,
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "max_position_embeddings": 32768,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
)
_MOE_DEFAULTS = {**QWEN3_5.defaults, "num_key_value_heads": 2, "intermediate_size": 5632}
QWEN3_5_MOE = replace(QWEN3_5, name="qwen3_5_moe", mixture=_EXPERTS, stacking="gate_up", defaults=_MOE_DEFAULTS)
QWEN3_NEXT = replace(
    QWEN3_5,
    name="qwen3_next",
    fused=("q_gated", "qkvz", "ba"),
    mixture=Mixture(weighs_chosen=None, shared="weighted"),
    defaults={**_MOE_DEFAULTS, "norm_topk_prob": True},
)
QWEN3_5_GGUF = replace(QWEN3_5, recurrent=tiled)
QWEN3_5_MOE_GGUF = replace(QWEN3_5_MOE, recurrent=tiled)
QWEN3_NEXT_GGUF = replace(QWEN3_NEXT, fused=("q_gated", "ba"))
