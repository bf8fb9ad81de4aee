"""GLM-4.7-Flash: DeepSeek-V3 with other sizes, and with its dense layers told by their numbers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvloom.checkpoints.families.known.deepseek import DEEPSEEK_V3
from kvloom.checkpoints.families.latents import latent_sizes
from kvloom.checkpoints.families.values import short
from kvloom.contract.errors import ModelError

_EXPERTS = {"num_experts_per_tok": 4, "norm_topk_prob": True, "n_shared_experts": 1, "n_routed_experts": 64}


def dense_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """mlp_layer_types says which layers have experts, else all but the first have."""
    kinds = config.get("mlp_layer_types") or ["dense"]
    if not isinstance(kinds, list) or any(kind not in ("dense", "sparse") for kind in kinds):
        raise ModelError(f"configuration: mlp_layer_types must name layers dense or sparse, got {short(kinds)}")
    dense = [index for index, kind in enumerate(kinds) if kind == "dense"]
    return latent_sizes(config) | {"mlp_only_layers": dense, "first_k_dense_replace": None}


GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    name="glm4_moe_lite",
    defaults={
        **_EXPERTS,
        "kv_lora_rank": 512,
        "q_lora_rank": 768,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "moe_intermediate_size": 1536,
        "routed_scaling_factor": 1.8,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
    },
    translated=dense_layers,
)
