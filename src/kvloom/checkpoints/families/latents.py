"""Latent attention in configurations."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvloom.checkpoints.families.mixers import Attention, LatentAttention
from kvloom.checkpoints.families.spec import Layer
from kvloom.checkpoints.families.values import count, flag, positive
from kvloom.contract.errors import ModelError


def latent_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys that families read alike, of a configuration with latent attention. Raises ModelError."""
    rope = count(config, "qk_rope_head_dim")
    return {
        "head_dim": count(config, "qk_nope_head_dim") + rope,
        "num_key_value_heads": count(config, "num_attention_heads"),
        "rotary_dim": rope,
    }


def latent_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The attention scale, 1 / sqrt(head_dim) times YaRN's magnitude twice, and where files have rotary partners."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scale = count(config, "head_dim") ** -0.5
    if rope.get("rope_type", rope.get("type", "default")) != "default" and rope.get("mscale_all_dim"):
        factor = positive(rope, "factor", 1.0)
        scale *= (1.0 if factor <= 1 else 0.1 * positive(rope, "mscale_all_dim", 1.0) * math.log(factor) + 1.0) ** 2
    return {"attention_scale": scale, "interleaved": flag(config, "rope_interleave", default=True)}


def latent_layers(layers: Sequence[Layer], config: Mapping[str, Any]) -> tuple[Layer, ...]:
    """`layers` of attention with latent attention in its place. Raises ModelError."""
    found = []
    for layer in layers:
        own = layer.mixer
        assert isinstance(own, Attention), "layers of other kinds keep no keys"
        if own.window is not None:
            raise ModelError("configuration: latent attention with a sliding_window is not supported")
        rope, ranks = count(config, "qk_rope_head_dim"), config.get("q_lora_rank")
        mixer = LatentAttention(
            own.num_heads,
            count(config, "kv_lora_rank"),
            own.head_dim - rope,
            rope,
            count(config, "v_head_dim"),
            None if ranks is None else count(config, "q_lora_rank"),
            own.rope,
        )
        found.append(replace(layer, mixer=mixer))
    return tuple(found)
