"""Granite 3: Llama with multipliers on embeddings, attention, residual stream and logits."""

from collections.abc import Mapping
from typing import Any

from kvloom.checkpoints.families.family import Family
from kvloom.checkpoints.families.values import positive


def _scales(config: Mapping[str, Any]) -> dict[str, float]:
    return {
        "embed_scale": positive(config, "embedding_multiplier", 1.0),
        "residual_scale": positive(config, "residual_multiplier", 1.0),
        "attention_scale": positive(config, "attention_multiplier", 1.0),
        "logit_scale": 1.0 / positive(config, "logits_scaling", 1.0),
    }


GRANITE = Family("granite", permuted_gguf=True, fields=_scales)
