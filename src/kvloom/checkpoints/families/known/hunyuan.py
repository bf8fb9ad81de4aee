"""Hunyuan dense: norms on each head of q and k behind the rotation, whose base `alpha` may stretch."""

from kvloom.checkpoints.families.family import Family

HUNYUAN = Family(
    "hunyuan_v1_dense",
    qk_norm="rotated",
    names={"q_norm": "self_attn.query_layernorm.weight", "k_norm": "self_attn.key_layernorm.weight"},
    defaults={"rms_norm_eps": 1e-5, "rope_own_fields": ("alpha",)},
)
