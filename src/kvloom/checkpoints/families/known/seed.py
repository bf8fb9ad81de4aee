"""Seed-OSS: Llama with biases on q, k and v, and on o if the configuration says so."""

from collections.abc import Mapping
from typing import Any

from kvloom.checkpoints.families.family import Family
from kvloom.checkpoints.families.values import flag


def _biases(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"qkv_bias": flag(config, "attention_bias", default=True), "o_bias": flag(config, "attention_out_bias")}


SEED = Family(
    "seed_oss",
    gguf_names={"mlp_norm": "post_attention_norm.weight"},
    defaults={"head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 524288},
    fields=_biases,
)
