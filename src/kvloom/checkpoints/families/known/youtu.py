"""Youtu-LLM: DeepSeek's latent attention, and dense MLPs."""

from dataclasses import replace

from kvloom.checkpoints.families.known.deepseek import DEEPSEEK_V2, SIZES
from kvloom.checkpoints.families.latents import latent_sizes

YOUTU = replace(
    DEEPSEEK_V2,
    name="youtu",
    mixture=None,
    defaults={**SIZES, "tie_word_embeddings": True, "max_position_embeddings": 131072},
    translated=latent_sizes,
)
