"""Mixtures of experts: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, gpt-oss."""

from dataclasses import replace

from kvloom.checkpoints.families.expert_layers import Mixture
from kvloom.checkpoints.families.family import Family
from kvloom.checkpoints.families.known.qwen import QWEN2, QWEN3

PLAIN_SHARED = {  # names in DeepSeek's folders and those of the same make
    "router_correction": "mlp.gate.e_score_correction_bias",
    **{f"shared_{part}": f"mlp.shared_experts.{part}_proj.weight" for part in ("gate", "up", "down")},
}
MIXTRAL = Family(
    "mixtral",
    permuted_gguf=True,
    mixture=Mixture(),
    names={
        "router": "block_sparse_moe.gate.weight",
        "experts.gate": "block_sparse_moe.experts.{}.w1.weight",
        "experts.up": "block_sparse_moe.experts.{}.w3.weight",
        "experts.down": "block_sparse_moe.experts.{}.w2.weight",
    },
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
)
QWEN2_MOE = replace(
    QWEN2,
    name="qwen2_moe",
    mixture=Mixture(weighs_chosen=None, shared="weighted"),
    defaults={**QWEN2.defaults, "num_key_value_heads": 16},
)
QWEN3_MOE = replace(
    QWEN3,
    name="qwen3_moe",
    mixture=Mixture(weighs_chosen=None),
    defaults={"window_needs_switch": True, "max_position_embeddings": 32768, "num_key_value_heads": 4},
)
QWEN3_MOE_GGUF = replace(QWEN3_MOE, mixture=Mixture())  # GGUF files do not state norm_topk_prob
OLMOE = Family(
    "olmoe",
    qk_norm="row",
    mixture=Mixture(weighs_chosen=None),
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
)
GPT_OSS = Family(
    "gpt-oss",
    qkv_bias=True,
    o_bias=True,
    has_sinks=True,
    clamps_glu=True,
    mixture=Mixture(has_bias=True),
    stacking="interleaved",
    names={"router": "mlp.router.weight"},
    gguf_names={"mlp_norm": "post_attention_norm.weight"},
    defaults={
        "sliding_window": 128,
        "sliding_window_pattern": 2,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_truncate": False,
    },
)
