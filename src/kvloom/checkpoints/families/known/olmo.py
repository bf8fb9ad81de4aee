"""OLMo 2 and 3: norms behind each branch and over all heads of q and k; OLMo 3 has three local layers to each full one.

Files in GGUF call both olmo2; one with a sliding window is OLMo 3.
"""

from dataclasses import replace

from kvloom.checkpoints.families.family import Family

OLMO2 = Family(
    "olmo",
    qk_norm="row",
    norms="post",
    defaults={"rms_norm_eps": 1e-5, "sliding_window_pattern": 4, "rope_local_unscaled": True},
)
OLMO3 = replace(OLMO2, defaults={**OLMO2.defaults, "rope_theta": 5e5, "sliding_window": 4096})
