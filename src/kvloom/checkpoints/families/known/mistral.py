"""Mistral 7B and its successors: Llama with an optional sliding window; GGUF files call it llama. Ministral 3: queries
that grow with their positions.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvloom.checkpoints.families.family import Family
from kvloom.checkpoints.families.values import count, positive

_GROWTH = "llama_4_scaling_beta"
GROWTH_FIELDS = (_GROWTH, "max_position_embeddings")  # of rope_parameters


def growth(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a spec whose queries grow with their positions."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get(_GROWTH) is None:
        return {}
    return {
        "query_growth": positive(rope, _GROWTH, 0.1),
        "growth_unit": count(rope, "original_max_position_embeddings"),
    }


MISTRAL = Family(
    "mistral",
    permuted_gguf=True,
    defaults={
        "sliding_window": 4096,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_own_fields": GROWTH_FIELDS,
    },
    fields=growth,
)
MINISTRAL = replace(MISTRAL, name="ministral")  # layer_types says which layers have the window
MINISTRAL3 = replace(
    MISTRAL,
    name="ministral3",
    defaults={
        **MISTRAL.defaults,
        "sliding_window": None,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
    },
)
