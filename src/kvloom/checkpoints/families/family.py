"""Family: the switches in which one line of decoders differs from another, and the configuration keys they share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from kvloom.checkpoints.families.expert_layers import Mixture, Stacking, experts_of, sparse_layers
from kvloom.checkpoints.families.hybrid import hybrid_layers, single_layers
from kvloom.checkpoints.families.latents import latent_layers
from kvloom.checkpoints.families.mixers import Attention, Recurrent
from kvloom.checkpoints.families.positions import layers_of, sees_ahead
from kvloom.checkpoints.families.spec import DecoderSpec, Layer
from kvloom.checkpoints.families.values import count, flag, positive
from kvloom.contract.errors import ModelError

ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {  # by the names of configurations
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


# of a layer's tensor, by canonical name: (number of rows, their factor), from the first row on; 0 = all
Factors = Mapping[str, tuple[tuple[int, float], ...]]
_BIASES = ("mlp_bias", "use_bias")  # of linears that have none here


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of the configuration that describes the decoder, for models that also have a vision part."""
    part = config.get("text_config")
    return part if isinstance(part, Mapping) else {}


def _no_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class Family:
    """What a family fixes; the rest comes from the checkpoint's configuration (Hugging Face key names)."""

    name: str
    qkv_bias: bool = False
    qk_norm: Literal["", "head", "row", "rotated"] = ""
    norms: Literal["pre", "post", "both"] = "pre"
    permuted_gguf: bool = False  # GGUF files hold the rows of q and k in interleaved RoPE order
    o_bias: bool = False
    has_sinks: bool = False
    clamps_glu: bool = False  # swiglu_limit and swiglu_alpha
    mixture: Mixture | None = None  # for models whose configuration may have experts
    stacking: Stacking = ""  # of the experts in folders
    gates_attention: bool = False  # see Attention.is_gated
    has_latents: bool = False  # all layers have latent attention
    recurrent: Callable[[Mapping[str, Any]], Recurrent] | None = None  # the mixer of its layers with a state
    recurrent_kind: str = ""  # name of these layers in layer_types
    has_guess_head: bool = False  # its files may hold a layer that guesses further tokens (guess_head.py)
    branches: Literal["two", "one", "three"] = "two"  # of a layer: a mixer and an MLP; either; two mixers and an MLP
    interleaved: bool = False  # rotary partners of q and k are side by side in all its files, in adapters too
    fused: tuple[str, ...] = ()  # tensors that files hold as one: "qkv", "gate_up", or those of picked.py
    norm_offset: float = 0.0  # folders hold the weights of norms minus this; GGUF files the weights themselves
    names: Mapping[str, str] = field(
        default_factory=dict
    )  # of a layer's tensors in folders, where they are not Llama's
    gguf_names: Mapping[str, str] = field(default_factory=dict)  # the same of GGUF files
    defaults: Mapping[str, Any] = field(default_factory=dict)  # where the configuration is silent
    translated: Callable[[Mapping[str, Any]], dict[str, Any]] = (
        _no_fields  # keys of its own as those that are read here
    )
    factors: Callable[[Mapping[str, Any]], Factors] | None = None  # of matrices in folders
    fields: Callable[[Mapping[str, Any]], dict[str, Any]] = _no_fields  # of DecoderSpec, that it alone computes

    def spec(self, config: Mapping[str, Any]) -> DecoderSpec:
        """The spec for a configuration. Raises ModelError that names the key of a missing, mistyped or impossible
        value.
        """
        config = {**self.defaults, **config}
        is_tied = flag(config, "tie_word_embeddings")  # of a model that sees: where either part says so
        config |= _text_part(config)
        config |= self.translated(config)
        hidden, heads = count(config, "hidden_size"), count(config, "num_attention_heads")
        kv_heads = count(config, "num_key_value_heads", heads)
        head_dim = count(config, "head_dim", hidden // heads)
        max_seq_len = count(config, "max_position_embeddings", 2048)
        if heads % kv_heads:
            raise ModelError(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
        if head_dim % 2:
            raise ModelError(f"head_dim {head_dim} is odd; rotary embedding pairs dimensions")
        if config.get("clip_qkv") is not None:
            raise ModelError(f"configuration: clip_qkv is not supported, got {config['clip_qkv']!r:.80}")
        if config.get("kv_lora_rank") is not None and not self.has_latents:
            raise ModelError(f"{self.name} with latent attention (kv_lora_rank) is not supported")
        own = self.fields(config)
        for key in _BIASES if own.get("qkv_bias", self.qkv_bias) else ("attention_bias", *_BIASES):
            if flag(config, key):
                raise ModelError(f"{self.name} with {key} is not supported")
        sizes = Attention(heads, kv_heads, head_dim, is_gated=self.gates_attention)
        layers = layers_of(config, sizes, max_seq_len)
        if self.has_latents:
            layers = latent_layers(layers, config)
        if self.recurrent is not None:
            layers = self._with_states(layers, config, self.recurrent(config))
        experts = experts_of(config, self.mixture, len(layers)) if self.mixture else None
        ahead = sees_ahead(config)
        if experts and self.branches != "one":
            sparse = sparse_layers(config, len(layers))
            layers = tuple(replace(layer, has_experts=own) for layer, own in zip(layers, sparse, strict=True))
        has_dense = any(layer.has_mlp for layer in layers)
        spec = DecoderSpec(
            family=self.name,
            hidden=hidden,
            intermediate=count(config, "intermediate_size") if has_dense else 0,
            vocab_size=count(config, "vocab_size"),
            max_seq_len=max_seq_len,
            layers=layers,
            norm_eps=positive(config, "rms_norm_eps", 1e-6),
            tie_embeddings=(is_tied or flag(config, "tie_word_embeddings")) and not ahead,
            qkv_bias=self.qkv_bias,
            qk_norm=self.qk_norm,
            norms=self.norms,
            activation="clamped" if self.clamps_glu else self._activation(config),
            glu_limit=positive(config, "swiglu_limit", 7.0) if self.clamps_glu else 0.0,
            glu_alpha=positive(config, "swiglu_alpha", 1.702) if self.clamps_glu else 0.0,
            o_bias=self.o_bias,
            has_sinks=self.has_sinks,
            experts=experts,
            sees_ahead=ahead,
            has_logits=not ahead,
            interleaved=self.interleaved,
        )
        return replace(spec, **own)

    def _with_states(self, layers: tuple[Layer, ...], config: Mapping[str, Any], mixer: Recurrent) -> tuple[Layer, ...]:
        """`layers`, of which some have `mixer`. Raises ModelError."""
        if self.branches == "one":
            return single_layers(layers, config, mixer)
        if self.branches == "three":
            return tuple(replace(layer, beside=mixer) for layer in layers)
        return hybrid_layers(layers, config, self.recurrent_kind, mixer)

    def _activation(self, config: Mapping[str, Any]) -> Literal["silu", "gelu_tanh"]:
        name = config.get("hidden_activation") or config.get("hidden_act") or "silu"
        if name not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ModelError(f"hidden_act {name!r:.80} is not supported by {self.name}; supported are {known}")
        return ACTIVATIONS[name]
