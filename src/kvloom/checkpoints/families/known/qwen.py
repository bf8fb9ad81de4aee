"""Qwen2 and Qwen2.5: biases on q, k and v. Qwen3: no biases, RMSNorm on each head of q and k."""

from kvloom.checkpoints.families.family import Family

_SHARED = {"window_needs_switch": True, "max_position_embeddings": 32768}
QWEN2 = Family("qwen2", qkv_bias=True, defaults=_SHARED)
QWEN3 = Family("qwen3", qk_norm="head", defaults={**_SHARED, "head_dim": 128})
