"""Mistral 4: DeepSeek-V3 with softmax scores of experts, and queries that grow with their positions."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvloom.checkpoints.families.expert_layers import Mixture
from kvloom.checkpoints.families.known.deepseek import DEEPSEEK_V3
from kvloom.checkpoints.families.known.mistral import GROWTH_FIELDS
from kvloom.checkpoints.families.latents import latent_sizes

_EXPERTS = {"num_experts_per_tok": 4, "norm_topk_prob": True, "n_shared_experts": 1, "n_routed_experts": 128}
_SIZES = {"kv_lora_rank": 256, "q_lora_rank": 1024, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 128}
_YARN = {"rope_type": "yarn", "factor": 128.0, "original_max_position_embeddings": 8192, "beta_fast": 32.0}
_YARN |= {"beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}


def _mistral4(config: Mapping[str, Any]) -> dict[str, Any]:
    ropes = config.get("rope_parameters") or config.get("rope_scaling") or _YARN
    return latent_sizes(config) | {"rope_parameters": ropes, "rope_scaling": None}


MISTRAL4 = replace(
    DEEPSEEK_V3,
    name="mistral4",
    mixture=Mixture(weighs_chosen=None, shared="plain"),
    stacking="gate_up",
    defaults={
        **_EXPERTS,
        **_SIZES,
        "moe_intermediate_size": 2048,
        "max_position_embeddings": 1048576,
        "rope_own_fields": GROWTH_FIELDS,
    },
    translated=_mistral4,
)
