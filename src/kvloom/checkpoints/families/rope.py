"""Rotary frequencies: every scaling rule of a configuration applied once, while loading."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvloom.checkpoints.families.mixers import Rope
from kvloom.contract.errors import ModelError

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
ROPE_FIELDS = (  # of rope_parameters; GGUF's factors are among them
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
    *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "finetuned"),
    *("low_freq_factor", "high_freq_factor", "long_factor", "short_factor", "freq_factors"),
    *("mrope_section", "mrope_interleaved"),  # dimensions of time, height and width, which are one number of a text
)
_OLD_NAMES = {"su": "longrope"}


def build_rope(dim: int, theta: float, scaling: Mapping[str, Any], max_seq_len: int) -> Rope:
    """Rope of `dim` dimensions. `scaling` has the keys of Hugging Face's rope_parameters ({} = none), `freq_factors`
    too, which divide the frequencies that the rule gives.

    `max_seq_len` is the context, and also the trained context if the scaling names none. Raises ModelError for an
    unknown rule.
    """
    rope = _scaled(dim, theta, scaling, max_seq_len)
    factors = scaling.get("freq_factors")
    return rope if factors is None else replace(rope, inv_freq=_divided(rope.inv_freq, factors))


def _divided(inv_freq: Sequence[float], factors: Sequence[float]) -> tuple[float, ...]:
    if len(factors) != len(inv_freq):
        raise ModelError(f"{len(factors)} factors for the {len(inv_freq)} frequencies of the rotary embedding")
    return tuple(freq / float(factor) for freq, factor in zip(inv_freq, factors, strict=True))


def _scaled(dim: int, theta: float, scaling: Mapping[str, Any], max_seq_len: int) -> Rope:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    kind = _OLD_NAMES.get(str(kind), kind)
    if kind == "dynamic" and scaling.get("alpha"):  # Hunyuan's: a longer base, whatever the length
        theta *= float(scaling["alpha"]) ** (dim / (dim - 2))
    inv_freq = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    try:
        if kind in ("default", "dynamic"):  # "dynamic" stretches what is longer than the context, and nothing is
            return Rope(tuple(inv_freq))
        if kind == "proportional":  # of the part that is rotated as of the whole head
            part = int(float(scaling.get("partial_rotary_factor", 1.0)) * dim // 2)
            factor = float(scaling.get("factor") or 1.0)
            return Rope(tuple(f / factor for f in inv_freq[:part]) + (0.0,) * (dim // 2 - part))
        if kind == "linear":
            return Rope(tuple(f / float(scaling["factor"]) for f in inv_freq))
        if kind == "llama3":
            return Rope(tuple(_llama3(inv_freq, scaling)))
        if kind == "yarn":
            return _yarn(dim, theta, inv_freq, scaling, max_seq_len)
        if kind == "longrope":
            return _longrope(inv_freq, scaling, max_seq_len)
    except KeyError as error:
        raise ModelError(f"rope scaling {kind!r:.80} lacks {error.args[0]!r}") from None
    raise ModelError(f"rope scaling {kind!r:.80} is not known; known are {', '.join(KINDS)}")


def _llama3(inv_freq: list[float], scaling: Mapping[str, Any]) -> list[float]:
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, those between blended."""
    factor, low, high = (float(scaling[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    context = float(scaling["original_max_position_embeddings"])
    scaled = []
    for freq in inv_freq:
        turns = context * freq / (2 * math.pi)
        keep = min(1.0, max(0.0, (turns - low) / (high - low)))
        scaled.append((1 - keep) * freq / factor + keep * freq)
    return scaled


def _yarn(dim: int, theta: float, inv_freq: list[float], scaling: Mapping[str, Any], max_seq_len: int) -> Rope:
    """YaRN (Peng et al. 2023): interpolate slow dimensions, keep fast ones, ramp between; sharpen attention."""
    factor = float(scaling["factor"])
    context = float(scaling.get("original_max_position_embeddings") or max_seq_len)

    def dimension(turns: float) -> float:
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(float(scaling.get("beta_fast") or 32))
    high = dimension(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = [min(1.0, max(0.0, (i - low) / max(high - low, 0.001))) for i in range(dim // 2)]
    freqs = tuple(f / factor * r + f * (1 - r) for f, r in zip(inv_freq, ramp, strict=True))
    return Rope(freqs, _yarn_attention(factor, scaling))


def _yarn_attention(factor: float, scaling: Mapping[str, Any]) -> float:
    """The factor of cos and sin."""
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return magnitude(float(scaling["mscale"])) / magnitude(float(scaling["mscale_all_dim"]))
    return magnitude(1.0)


def _longrope(inv_freq: Sequence[float], scaling: Mapping[str, Any], max_seq_len: int) -> Rope:
    """LongRoPE (Ding et al. 2024): a factor a frequency, one set for sequences of the trained context, one for longer.

    The set is chosen once, by the longest sequence that is served, because keys in the cache are rotated already.
    """
    context = int(scaling.get("original_max_position_embeddings") or max_seq_len)
    factor = float(scaling.get("factor") or max_seq_len / context)
    if scaling.get("attention_factor") is not None:
        attention = float(scaling["attention_factor"])
    else:
        attention = math.sqrt(1 + math.log(factor) / math.log(context)) if factor > 1 else 1.0
    long, short = (_divided(inv_freq, scaling[key]) for key in ("long_factor", "short_factor"))
    return Rope(long, attention, short, context)
