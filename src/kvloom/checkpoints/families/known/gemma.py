"""Gemma 1: scaled embeddings, weights of norms stored as 1 + w. Gemma 2 and 3 (text): norms before and behind each
branch, local and full layers, softcaps.

EmbeddingGemma is Gemma 3 with bidirectional attention.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvloom.checkpoints.families.family import Family
from kvloom.checkpoints.families.spec import DecoderSpec
from kvloom.checkpoints.families.values import count, positive

_SHARED = {
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
_NAMES = {"mlp_norm": "pre_feedforward_layernorm.weight"}
_LAYERS_OF_27B = (46, 62)  # Gemma 2's, Gemma 3's: their attention scale differs, which GGUF files do not state


def _scales(config: Mapping[str, Any]) -> dict[str, float]:
    hidden, heads = count(config, "hidden_size"), count(config, "num_attention_heads")
    size = count(config, "head_dim", hidden // heads)
    if count(config, "num_hidden_layers") in _LAYERS_OF_27B:
        size = hidden // heads
    return {
        "embed_scale": math.sqrt(hidden),
        "attention_scale": positive(config, "query_pre_attn_scalar", size) ** -0.5,
        "attention_softcap": _softcap(config, "attn_logit_softcapping"),
        "logit_softcap": logit_softcap(config),
    }


def logit_softcap(config: Mapping[str, Any]) -> float:
    """0 = none."""
    return _softcap(config, "final_logit_softcapping")


def _softcap(config: Mapping[str, Any], key: str) -> float:
    return positive(config, key, 1.0) if config.get(key) is not None else 0.0


@dataclass(frozen=True, slots=True)
class _Gemma1(Family):
    def spec(self, config: Mapping[str, Any]) -> DecoderSpec:
        """See Family. Its first releases call their activation gelu."""
        is_old = config.get("hidden_act") == "gelu"
        return Family.spec(self, {**config, "hidden_act": "gelu_pytorch_tanh"} if is_old else config)


GEMMA = _Gemma1(
    "gemma",
    norm_offset=1.0,
    defaults={
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "head_dim": 256,
        "num_key_value_heads": 16,
        "max_position_embeddings": 8192,
    },
    fields=lambda config: {"embed_scale": math.sqrt(count(config, "hidden_size"))},
)
GEMMA2 = Family(
    "gemma2",
    norms="both",
    norm_offset=1.0,
    names=_NAMES,
    defaults={
        **_SHARED,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    fields=_scales,
)
_GEMMA3 = {
    **_SHARED,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_local_unscaled": True,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}
GEMMA3 = Family(
    "gemma3",
    qk_norm="head",
    norms="both",
    norm_offset=1.0,
    names=_NAMES,
    defaults=_GEMMA3,
    fields=_scales,
)
GEMMA_EMBEDDING = replace(GEMMA3, defaults={**_GEMMA3, "use_bidirectional_attention": True})  # as GGUF files call it
