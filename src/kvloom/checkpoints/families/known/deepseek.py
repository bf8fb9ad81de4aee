"""DeepSeek-V2, V3 and R1 (Kimi K2 is one of them): latent attention, most of them with experts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvloom.checkpoints.families.expert_layers import Mixture
from kvloom.checkpoints.families.family import Family
from kvloom.checkpoints.families.known.mistral import growth
from kvloom.checkpoints.families.known.mixtures import PLAIN_SHARED
from kvloom.checkpoints.families.latents import latent_fields, latent_sizes
from kvloom.checkpoints.families.values import flag, short
from kvloom.contract.errors import ModelError

SIZES = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
_V3_EXPERTS: dict[str, Any] = {
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
}
_V3_EXPERTS |= {"n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5}


def _v2(config: Mapping[str, Any]) -> dict[str, Any]:
    """Groups of experts count for one way of choosing alone. Raises ModelError."""
    method = config.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelError(f"configuration: topk_method {short(method)} is not known")
    if flag(config, "norm_topk_prob"):
        raise ModelError("configuration: norm_topk_prob is not supported by deepseek_v2")
    return latent_sizes(config) | ({"n_group": None, "topk_group": None} if method == "greedy" else {})


def fields_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """See Family.fields."""
    return {**latent_fields(config), **growth(config)}


DEEPSEEK_V2 = Family(
    "deepseek_v2",
    has_latents=True,
    interleaved=True,
    mixture=Mixture(weighs_chosen=False, shared="plain", group_best=1),
    names=PLAIN_SHARED,
    defaults={**SIZES, "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407},
    translated=_v2,
    fields=fields_of,
)
DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    name="deepseek_v3",
    mixture=Mixture(weighs_chosen=None, shared="plain", scores="sigmoid", has_correction=True),
    defaults={**SIZES, **_V3_EXPERTS, "moe_intermediate_size": 2048, "max_position_embeddings": 4096},
    translated=latent_sizes,
)
