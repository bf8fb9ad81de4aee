"""Qwen2 and Qwen2.5: biases on q, k and v."""

from kvloom.checkpoints.families.family import Family

QWEN2 = Family("qwen2", qkv_bias=True, defaults={"window_needs_switch": True})
