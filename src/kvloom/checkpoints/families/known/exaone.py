"""EXAONE 4: norms behind each branch and on heads of q and k; layers beside those with a window have no RoPE."""

from kvloom.checkpoints.families.family import Family

EXAONE4 = Family(
    "exaone4",
    qk_norm="head",
    norms="post",
    defaults={
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "rope_in_windows": True,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
    },
)
