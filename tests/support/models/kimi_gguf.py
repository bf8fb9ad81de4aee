"""Kimi-Linear as llama.cpp's converter writes it into GGUF files."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.support.models import latent_gguf

Array = np.ndarray[Any, Any]
ARCHITECTURE = "kimi-linear"
_NAMES = {
    "self_attn.g_a_proj.": "ssm_g_a.",
    "self_attn.g_b_proj.": "ssm_g_b.",
    "self_attn.forget_gate.f_a_proj.": "ssm_f_a.",
    "self_attn.forget_gate.f_b_proj.": "ssm_f_b.",
    "self_attn.forget_gate.dt_bias": "ssm_dt.bias",
    "self_attn.b_proj.": "ssm_beta.",
    "self_attn.o_norm.": "ssm_norm.",
}


def sizes_of(config: Any) -> dict[str, Any]:
    """What such files say: delta attention has as many heads as attention, and no heads of keys."""
    return {
        "attention__head_count_kv": [int(kind == "full_attention") for kind in config.layer_types],
        "attention__kv_lora_rank": config.kv_lora_rank,
        "attention__key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention__key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention__value_length_mla": config.v_head_dim,
        "rope__dimension_count": config.qk_rope_head_dim,
        "ssm__conv_kernel": config.linear_conv_kernel_dim,
        "kda__head_dim": config.linear_head_dim,
        "expert_count": config.num_local_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_gating_func": 2,
        "leading_dense_block_count": config.mlp_layer_types.index("sparse"),
    }


def converted(config: Any, key: str, data: Array) -> Iterator[tuple[str, Array]]:
    """(name, values) of the tensors made of one that is called `key`."""
    at = f"blk.{key.split('.')[2]}" if ".layers." in key else ""
    if key.endswith("self_attn.conv1d.weight"):
        for part, rows in zip("qkv", np.split(data, 3), strict=True):
            yield f"{at}.ssm_conv1d_{part}.weight", rows.reshape(1, -1, 1, data.shape[-1])
    elif key.endswith("A_log"):
        yield f"{at}.ssm_a", -np.exp(data)
    elif key.endswith("kv_b_proj.weight"):
        yield from latent_gguf.converted(config, key, data)
    else:
        for theirs, ours in _NAMES.items():
            key = key.replace(theirs, ours)
        yield key, data
