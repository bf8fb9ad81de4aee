"""Granite 3: Llama with multipliers on embeddings, attention, residual stream and logits; with experts, an MLP beside
them that all tokens pass.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvloom.checkpoints.families.expert_layers import Mixture
from kvloom.checkpoints.families.family import Family
from kvloom.checkpoints.families.values import positive


def _scales(config: Mapping[str, Any]) -> dict[str, float]:
    return {
        "embed_scale": positive(config, "embedding_multiplier", 1.0),
        "residual_scale": positive(config, "residual_multiplier", 1.0),
        "attention_scale": positive(config, "attention_multiplier", 1.0),
        "logit_scale": 1.0 / positive(config, "logits_scaling", 1.0),
    }


def shared_size(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of the MLP that all tokens pass, which is alone in a model without experts."""
    size = config.get("shared_intermediate_size", config.get("shared_expert_intermediate_size"))
    is_alone = not config.get("num_local_experts") and size
    return {"shared_expert_intermediate_size": size} | ({"intermediate_size": size} if is_alone else {})


GRANITE = Family("granite", permuted_gguf=True, fields=_scales)
GRANITE_MOE_GGUF = replace(
    GRANITE, name="granitemoe", mixture=Mixture(shared="sized", is_optional=True), translated=shared_size
)
GRANITE_MOE = replace(
    GRANITE_MOE_GGUF,
    stacking="gate_up",
    fused=("shared_gate_up",),
    names={
        "router": "block_sparse_moe.router.layer.weight",
        "gate_up_experts": "block_sparse_moe.input_linear.weight",
        "down_experts": "block_sparse_moe.output_linear.weight",
        "shared_gate_up": "shared_mlp.input_linear.weight",
        "shared_down": "shared_mlp.output_linear.weight",
    },
    defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
)
GRANITE_SHARED = replace(
    GRANITE_MOE, name="granitemoeshared", defaults={**GRANITE_MOE.defaults, "shared_intermediate_size": 1024}
)
