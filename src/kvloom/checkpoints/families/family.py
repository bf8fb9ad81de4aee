"""Family: the switches in which one line of decoders differs from another, and the configuration keys they share."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvloom.checkpoints.families.rope import build_rope
from kvloom.checkpoints.families.spec import DecoderSpec, Rope
from kvloom.contract.errors import ModelError

_MOST = {"num_hidden_layers": 1 << 12, "head_dim": 1 << 12, "num_attention_heads": 1 << 16}  # else _MOST_ANY
_MOST_ANY = 1 << 31


@dataclass(frozen=True, slots=True)
class Family:
    """What a family fixes; the rest comes from the checkpoint's configuration (Hugging Face key names)."""

    name: str
    qkv_bias: bool = False
    qk_norm: bool = False
    permuted_gguf: bool = False  # GGUF files hold the rows of q and k in interleaved RoPE order
    window_needs_switch: bool = False  # sliding_window counts only when use_sliding_window is true
    default_tied: bool = False  # tie_word_embeddings where the configuration is silent

    def spec(self, config: Mapping[str, Any]) -> DecoderSpec:
        """Raises ModelError naming the key when a value is missing, of the wrong type or impossible."""
        hidden, heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
        kv_heads = _count(config, "num_key_value_heads", heads)
        head_dim = _count(config, "head_dim", hidden // heads)
        max_seq_len = _count(config, "max_position_embeddings", 2048)
        if heads % kv_heads:
            raise ModelError(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
        if head_dim % 2:
            raise ModelError(f"head_dim {head_dim} is odd; rotary embedding pairs dimensions")
        if config.get("hidden_act", "silu") not in ("silu", "swish"):
            raise ModelError(f"hidden_act {config['hidden_act']!r} is not supported by {self.name}; silu is")
        if config.get("mlp_bias") or (config.get("attention_bias") and not self.qkv_bias):
            raise ModelError(f"{self.name} with attention_bias or mlp_bias is not supported")
        return DecoderSpec(
            family=self.name,
            num_layers=_count(config, "num_hidden_layers"),
            hidden=hidden,
            intermediate=_count(config, "intermediate_size"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=_count(config, "vocab_size"),
            max_seq_len=max_seq_len,
            rope=_rope(config, head_dim, max_seq_len),
            norm_eps=_real("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
            tie_embeddings=bool(config.get("tie_word_embeddings", self.default_tied)),
            qkv_bias=self.qkv_bias,
            qk_norm=self.qk_norm,
            sliding_window=self._window(config),
        )

    def _window(self, config: Mapping[str, Any]) -> int | None:
        """Tokens a query sees, itself included; None = all. A mix of windowed and full layers is refused."""
        window = config.get("sliding_window")
        if window is None or (self.window_needs_switch and not config.get("use_sliding_window")):
            return None
        types = config.get("layer_types") or ["sliding_attention"]
        if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
            raise ModelError(f"configuration: layer_types must be a list of names, got {types!r:.80}")
        kinds = set(types)
        if len(kinds) > 1:
            raise ModelError("layers with and without sliding_window in one model are not supported")
        return _count(config, "sliding_window") if kinds == {"sliding_attention"} else None


def _rope(config: Mapping[str, Any], head_dim: int, max_seq_len: int) -> Rope:
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise ModelError(f"configuration: rope_scaling must be an object, got {scaling!r:.80}")
    theta = _real("rope_theta", scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)
    try:
        return build_rope(head_dim, theta, scaling, max_seq_len)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ModelError(f"configuration: rope_theta and rope_scaling cannot be used: {error}") from None


def _count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ModelError(f"configuration: {key} must be a positive whole number, got {_short(value)}")
    if value > (most := _MOST.get(key, _MOST_ANY)):
        raise ModelError(f"configuration: {key} is {_short(value)}, more than {most}")
    return value


def _real(key: str, value: object) -> float:
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ModelError(f"configuration: {key} must be a number, got {_short(value)}")
    return number


def _short(value: object) -> str:
    """As in a message: whole numbers may have thousands of digits."""
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than Python prints
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:77]}..."
