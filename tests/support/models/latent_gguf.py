"""Latent attention as converters write it into GGUF files."""

from collections.abc import Iterator
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
ARCHITECTURES = ("deepseek2", "mistral4")
NAMES = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
}


def metadata_of(config: Any, arch: str) -> dict[str, Any]:
    """What such files say; those before April 2025 (config.has_kv_b) have the sizes of heads without absorption."""
    ropes, absorbed = config.rope_parameters, config.kv_lora_rank + config.qk_rope_head_dim
    own: dict[str, Any] = {
        "attention__head_count_kv": 1,
        "attention__kv_lora_rank": config.kv_lora_rank,
        "attention__key_length": absorbed,
        "attention__value_length": config.kv_lora_rank,
        "rope__dimension_count": config.qk_rope_head_dim,
        "leading_dense_block_count": getattr(config, "first_k_dense_replace", config.num_hidden_layers),
        "expert_shared_count": getattr(config, "n_shared_experts", 0),
        "attention__key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention__value_length_mla": config.v_head_dim,
    }
    if config.q_lora_rank is not None:
        own["attention__q_lora_rank"] = config.q_lora_rank
    if getattr(config, "n_routed_experts", None):
        own |= {"expert_count": config.n_routed_experts, "expert_used_count": config.num_experts_per_tok}
        own |= {"expert_weights_scale": config.routed_scaling_factor}
        own |= {"expert_feed_forward_length": config.moe_intermediate_size}
        own |= {"expert_weights_norm": True} if config.norm_topk_prob else {}
    if getattr(config, "n_group", None):
        own |= {"expert_group_count": config.n_group, "expert_group_used_count": config.topk_group}
    if ropes["rope_type"] == "yarn":
        own |= {"rope__scaling__type": "yarn", "rope__scaling__factor": ropes["factor"]}
        own |= {"rope__scaling__original_context_length": ropes["original_max_position_embeddings"]}
        own |= {"rope__scaling__yarn_log_multiplier": 0.1 * ropes["mscale_all_dim"]}
    if getattr(config, "has_kv_b", False):
        for key in ("key_length", "value_length"):
            own[f"attention__{key}"] = own.pop(f"attention__{key}_mla")
        own["attention__head_count_kv"] = config.num_attention_heads
    return {f"{arch}__{key}": value for key, value in own.items()}


def converted(config: Any, key: str, data: Array) -> Iterator[tuple[str, Array]]:
    """kv_b_proj in two, unless config.has_kv_b; other tensors as they are."""
    if not key.endswith("kv_b_proj.weight") or getattr(config, "has_kv_b", False):
        yield key, data
        return
    heads = data.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
    layer = key.split(".")[2]
    yield f"blk.{layer}.attn_k_b.weight", heads[:, : config.qk_nope_head_dim].swapaxes(1, 2)
    yield f"blk.{layer}.attn_v_b.weight", heads[:, config.qk_nope_head_dim :]
