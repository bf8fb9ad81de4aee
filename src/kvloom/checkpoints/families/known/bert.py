"""BERT, RoBERTa and XLM-RoBERTa: encoders with learned positions, norms behind each sum, MLPs without a gate."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvloom.checkpoints.families.family import Family
from kvloom.checkpoints.families.mixers import Attention
from kvloom.checkpoints.families.spec import DecoderSpec, Encoder, Layer
from kvloom.checkpoints.families.values import count, flag, positive, short
from kvloom.contract.errors import ModelError

_LAYER = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "o": "attention.output.dense",
    "up": "intermediate.dense",
    "down": "output.dense",
}
_NORMS = {"attn_post_norm": "attention.output.LayerNorm", "mlp_post_norm": "output.LayerNorm"}
_NAMES = {
    "layers": "model.encoder.layer",
    "embed": "model.embeddings.word_embeddings.weight",
    "positions": "model.embeddings.position_embeddings.weight",
    "types": "model.embeddings.token_type_embeddings.weight",
    "embed_norm": "model.embeddings.LayerNorm.weight",
    "embed_norm_bias": "model.embeddings.LayerNorm.bias",
    **{part: f"{name}.weight" for part, name in {**_LAYER, **_NORMS}.items()},
    **{f"{part}_bias": f"{name}.bias" for part, name in {**_LAYER, **_NORMS}.items()},
}


_GGUF_NAMES = {
    "positions": "position_embd.weight",
    "types": "token_types.weight",
    "embed_norm": "token_embd_norm.weight",
    "embed_norm_bias": "token_embd_norm.bias",
    "attn_post_norm": "attn_output_norm.weight",
    "attn_post_norm_bias": "attn_output_norm.bias",
    "mlp_post_norm": "layer_output_norm.weight",
    "mlp_post_norm_bias": "layer_output_norm.bias",
    "up_bias": "ffn_up.bias",
    "down_bias": "ffn_down.bias",
}


@dataclass(frozen=True, slots=True)
class EncoderFamily(Family):
    """`begins_behind_padding`: positions are counted from pad_token_id + 1 on, as fairseq's models do."""

    begins_behind_padding: bool = False

    def spec(self, config: Mapping[str, Any]) -> DecoderSpec:
        """See Family."""
        hidden, heads = count(config, "hidden_size"), count(config, "num_attention_heads")
        if hidden % heads:
            raise ModelError(f"hidden_size {hidden} is no multiple of num_attention_heads {heads}")
        for key, known in (("hidden_act", "gelu"), ("position_embedding_type", "absolute")):
            if config.get(key) not in (None, known):
                raise ModelError(f"{key} {short(config[key])} is not supported by {self.name}; supported is {known}")
        if flag(config, "is_decoder") or flag(config, "add_cross_attention"):
            raise ModelError(f"{self.name} as a decoder is not supported")
        num_positions, first = count(config, "max_position_embeddings", 512), self._first_position(config)
        if num_positions <= first:
            raise ModelError(
                f"configuration: max_position_embeddings is {num_positions}, the first position is {first}"
            )
        return DecoderSpec(
            family=self.name,
            hidden=hidden,
            intermediate=count(config, "intermediate_size"),
            vocab_size=count(config, "vocab_size"),
            max_seq_len=num_positions - first,
            layers=(Layer(Attention(heads, heads, hidden // heads)),) * count(config, "num_hidden_layers"),
            norm_eps=positive(config, "layer_norm_eps", 1e-12),
            tie_embeddings=False,
            qkv_bias=True,
            o_bias=True,
            norms="sum",
            sees_ahead=True,
            encoder=Encoder(num_positions, first, count(config, "type_vocab_size", 2)),
            has_logits=False,
        )

    def _first_position(self, config: Mapping[str, Any]) -> int:
        if not self.begins_behind_padding:
            return 0
        padding = config.get("pad_token_id", 1)
        if not isinstance(padding, int) or padding < 0:
            raise ModelError(f"configuration: pad_token_id must be a token id, got {short(padding)}")
        return padding + 1


BERT = EncoderFamily("bert", names=_NAMES, gguf_names=_GGUF_NAMES)  # GGUF files call RoBERTa bert, too
ROBERTA = EncoderFamily("roberta", names=_NAMES, begins_behind_padding=True)
