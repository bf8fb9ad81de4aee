"""OLMo 2 and 3: norms behind each branch and over all heads of q and k; OLMo 3 has three local layers to each full one.

Files in GGUF call both olmo2; one with a sliding window is OLMo 3.
"""

from kvloom.checkpoints.families.family import Family

OLMO = Family("olmo", qk_norm="row", norms="post", defaults={"sliding_window_pattern": 4, "rope_local_unscaled": True})
