"""LFM2: most layers have a gated short convolution, the others attention. Folders without experts state the MLPs' size
before it is adjusted, GGUF files the size itself.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvloom.checkpoints.families.expert_layers import Mixture
from kvloom.checkpoints.families.family import Family
from kvloom.checkpoints.families.hybrid import short_conv
from kvloom.checkpoints.families.values import count, flag, positive
from kvloom.contract.errors import ModelError


def _sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    size = count(config, "intermediate_size" if config.get("block_ff_dim") is None else "block_ff_dim")
    if flag(config, "block_auto_adjust_ff_dim"):
        unit = count(config, "block_multiple_of", 256)
        adjusted = int(positive(config, "block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
        size = -(-adjusted // unit) * unit
    if flag(config, "conv_bias") or not flag(config, "use_expert_bias", default=True):
        raise ModelError("lfm2 with conv_bias, or without use_expert_bias, is not supported")
    norm = "norm_eps" if config.get("norm_eps") is not None else "rms_norm_eps"
    tie = "tie_embedding" if config.get("tie_embedding") is not None else "tie_word_embeddings"
    return {"intermediate": size, "norm_eps": positive(config, norm, 1e-5), "tie_embeddings": flag(config, tie)}


_DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 128000, "rope_theta": 1e6, "conv_L_cache": 3}
_DEFAULTS |= {"tie_word_embeddings": True}
_MLP = (("gate", "w1"), ("up", "w3"), ("down", "w2"))
LFM2_GGUF = Family(
    "lfm2",
    qk_norm="head",
    recurrent=short_conv,
    recurrent_kind="conv",
    names={
        "norm": "model.embedding_norm.weight",
        "attn_norm": "operator_norm.weight",
        "mlp_norm": "ffn_norm.weight",
        **{f"{part}_norm": f"self_attn.{part}_layernorm.weight" for part in "qk"},
        "o": "self_attn.out_proj.weight",
        "conv": "conv.conv.weight",
        "out": "conv.out_proj.weight",
        **{part: f"feed_forward.{name}.weight" for part, name in _MLP},
        **{f"experts.{part}": f"feed_forward.experts.{{}}.{name}.weight" for part, name in _MLP},
        "router": "feed_forward.gate.weight",
        "router_correction": "feed_forward.expert_bias",
    },
    gguf_names={"norm": "token_embd_norm.weight", "conv": "shortconv.conv.weight", "out": "shortconv.out_proj.weight"},
    defaults=_DEFAULTS,
    fields=_sizes,
)
LFM2 = replace(LFM2_GGUF, defaults={**_DEFAULTS, "block_auto_adjust_ff_dim": True})
LFM2_MOE = replace(
    LFM2_GGUF,
    name="lfm2_moe",
    mixture=Mixture(weighs_chosen=None, scores="sigmoid", has_correction=True),
    defaults={**_DEFAULTS, "num_dense_layers": 2, "norm_topk_prob": True},
)
