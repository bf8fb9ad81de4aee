"""Phi-3, Phi-3.5 and Phi-4: q, k and v in one tensor, gate and up in another; a part of each head rotated; LongRoPE."""

from kvloom.checkpoints.families.family import Family

PHI3 = Family("phi3", fused=("qkv", "gate_up"), defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096})
