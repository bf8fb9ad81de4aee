"""Llama 1 to 3 and the many models of the same shape (SmolLM2 among them); SmolLM3, where some layers have no RoPE;
EuroBERT, whose tokens see later ones.
"""

from collections.abc import Mapping
from typing import Any

from kvloom.checkpoints.families.expert_layers import Mixture
from kvloom.checkpoints.families.family import Family


def _seeing_ahead(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"is_causal": False}


LLAMA = Family("llama", permuted_gguf=True, mixture=Mixture(is_optional=True))  # GGUF files call Mixtral llama, too
SMOLLM3 = Family(
    "smollm3",
    permuted_gguf=True,
    defaults={
        "no_rope_layer_interval": 4,
        "tie_word_embeddings": True,
        "window_needs_switch": True,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 2e6,
    },
)
EUROBERT = Family("eurobert", translated=_seeing_ahead, defaults={"rms_norm_eps": 1e-5})
