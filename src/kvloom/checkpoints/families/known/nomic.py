"""NomicBERT: BERT's norms and token types, with rotary positions and gated MLPs, and without biases of linears."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvloom.checkpoints.families.family import Family
from kvloom.checkpoints.families.mixers import Attention
from kvloom.checkpoints.families.positions import layers_of
from kvloom.checkpoints.families.spec import DecoderSpec, Encoder
from kvloom.checkpoints.families.values import count, flag, positive, short
from kvloom.contract.errors import ModelError

_TOP = {
    "embed": "embeddings.word_embeddings.weight",
    "types": "embeddings.token_type_embeddings.weight",
    "embed_norm": "emb_ln.weight",
    "embed_norm_bias": "emb_ln.bias",
    "layers": "encoder.layers",
}
_NAMES = {
    **{part: f"model.{name}" for part, name in _TOP.items()},
    "qkv": "attn.Wqkv.weight",
    "o": "attn.out_proj.weight",
    "up": "mlp.fc11.weight",
    "gate": "mlp.fc12.weight",
    "down": "mlp.fc2.weight",
    "attn_post_norm": "norm1.weight",
    "attn_post_norm_bias": "norm1.bias",
    "mlp_post_norm": "norm2.weight",
    "mlp_post_norm_bias": "norm2.bias",
}
_GGUF_NAMES = {
    "types": "token_types.weight",
    "embed_norm": "token_embd_norm.weight",
    "embed_norm_bias": "token_embd_norm.bias",
    "attn_post_norm": "attn_output_norm.weight",
    "attn_post_norm_bias": "attn_output_norm.bias",
    "mlp_post_norm": "layer_output_norm.weight",
    "mlp_post_norm_bias": "layer_output_norm.bias",
}
_KEYS = {  # of the model's own configuration, as its folders of 2024 have it
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
    "rope_theta": "rotary_emb_base",
    "hidden_act": "activation_function",
}
_PLAIN: Mapping[str, tuple[object, ...]] = {  # fields of that, and the values that are computed here
    "moe_every_n_layers": (None, 0),
    "prenorm": (None, False),
    "causal": (None, False),
    "qkv_proj_bias": (None, False),
    "mlp_fc1_bias": (None, False),
    "mlp_fc2_bias": (None, False),
    "rotary_emb_fraction": (None, 1),
    "rotary_emb_interleaved": (None, False),
    "rotary_emb_scale_base": (None,),
    "rotary_scaling_factor": (None,),
    "use_rms_norm": (None, False),
    "parallel_block": (None, False),
    "scale_attn_by_inverse_layer_idx": (None, False),
    "hidden_act": (None, "silu", "swiglu"),
}


@dataclass(frozen=True, slots=True)
class NomicFamily(Family):
    """See the module."""

    def spec(self, config: Mapping[str, Any]) -> DecoderSpec:
        """See Family."""
        old = {new: config[key] for new, key in _KEYS.items() if config.get(key) is not None}
        config = {"is_causal": False, "rope_theta": 1000.0, **config, **old}
        for key, known in _PLAIN.items():
            if config.get(key) not in known:
                raise ModelError(f"{key} {short(config[key])} is not supported by {self.name}")
        if flag(config, "is_causal"):
            raise ModelError(f"{self.name} with is_causal is not supported")
        hidden, heads = count(config, "hidden_size"), count(config, "num_attention_heads")
        head_dim = count(config, "head_dim", hidden // heads)
        if head_dim % 2:
            raise ModelError(f"head_dim {head_dim} is odd; rotary embedding pairs dimensions")
        longest = count(config, "max_trained_positions", count(config, "max_position_embeddings", 2048))
        longest = min(longest, count(config, "max_position_embeddings", longest))
        return DecoderSpec(
            family=self.name,
            hidden=hidden,
            intermediate=count(config, "intermediate_size"),
            vocab_size=count(config, "vocab_size"),
            max_seq_len=longest,
            layers=layers_of(config, Attention(heads, heads, head_dim), longest),
            norm_eps=positive(config, "layer_norm_eps", 1e-12),
            tie_embeddings=False,
            norms="sum",
            sees_ahead=True,
            encoder=Encoder(0, 0, count(config, "type_vocab_size", 2), is_gated=True),
            has_logits=False,
        )


NOMIC = NomicFamily("nomic-bert", names=_NAMES, gguf_names=_GGUF_NAMES, fused=("qkv",))
