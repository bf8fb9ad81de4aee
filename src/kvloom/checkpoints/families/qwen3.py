"""Qwen3: no biases, RMSNorm on each head of q and k."""

from kvloom.checkpoints.families.family import Family

QWEN3 = Family("qwen3", qk_norm="head", defaults={"window_needs_switch": True})
