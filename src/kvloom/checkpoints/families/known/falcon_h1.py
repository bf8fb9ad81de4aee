"""Falcon-H1: each layer has attention and Mamba-2, which read the same, and an MLP. Folders have multipliers of inputs
and outputs, which GGUF files hold in their tensors.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvloom.checkpoints.families.family import Factors, Family
from kvloom.checkpoints.families.hybrid import mamba2, mamba2_names
from kvloom.checkpoints.families.values import flag, positive, reals
from kvloom.contract.errors import ModelError


def _checked(config: Mapping[str, Any]) -> dict[str, Any]:
    is_first = flag(config, "mamba_rms_norm") and flag(config, "mamba_norm_before_gate")
    if is_first or flag(config, "projectors_bias"):
        key = "mamba_norm_before_gate" if is_first else "projectors_bias"
        raise ModelError(f"falcon_h1 with {key} is not supported")
    scales = {"embed_scale": "embedding_multiplier", "logit_scale": "lm_head_multiplier"}
    return {name: positive(config, key, 1.0) for name, key in scales.items()} | {"is_multiplied": True}


def _factors(config: Mapping[str, Any]) -> Factors:
    names = ("attention_in", "attention_out", "key", "ssm_in", "ssm_out")
    attention, out, key, before, behind = (positive(config, f"{name}_multiplier", 1.0) for name in names)
    z, x, b, c, step = (before * part for part in reals(config, "ssm_multipliers", 5))
    (gate, down), mixer = reals(config, "mlp_multipliers", 2), mamba2(config)
    shared = mixer.num_groups * mixer.state_dim
    whole = {"q": attention, "k": attention * key, "v": attention, "o": out, "out": behind}
    whole |= {"gate_in": z, "decay_in": step, "gate": gate, "down": down}
    rows = (mixer.size, x), (shared, b), (shared, c)
    return {"conv_in": rows, **{name: ((0, factor),) for name, factor in whole.items()}}


_SIZES = {"num_key_value_heads": 8, "mamba_d_ssm": 1024, "mamba_n_heads": 128, "mamba_d_state": 256, "mamba_d_conv": 4}
_SIZES |= {"mamba_expand": 2, "mamba_norm_before_gate": True, "mamba_rms_norm": False}
_GGUF_NAMES = {"mlp_norm": "ffn_norm"}  # sic
FALCON_H1_GGUF = Family(
    "falcon_h1", branches="three", recurrent=mamba2, fused=("mamba_in",), gguf_names=_GGUF_NAMES, fields=_checked
)
FALCON_H1 = replace(
    FALCON_H1_GGUF,
    names={
        **mamba2_names("mamba"),
        **{part: f"feed_forward.{part}_proj.weight" for part in ("gate", "up", "down")},
        "mlp_norm": "pre_ff_layernorm.weight",
        "norm": "model.final_layernorm.weight",
    },
    defaults={**_SIZES, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5},
    factors=_factors,
)
