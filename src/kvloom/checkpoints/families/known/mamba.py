"""Mamba-2: layers of one branch, a mixer with a state, and no attention."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvloom.checkpoints.families.family import Family
from kvloom.checkpoints.families.hybrid import LINEAR, mamba2, mamba2_names, own_keys
from kvloom.checkpoints.families.values import count

_UNLIMITED = 1 << 20  # tokens: folders do not say how long sequences may be; what llama.cpp's converter writes
_KEYS = {"mamba_n_heads": "num_heads", "mamba_d_head": "head_dim", "mamba_d_state": "state_size"}
_KEYS |= {"mamba_expand": "expand"}
_NO_HEADS = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2}  # of attention, which no layer has
_SIZES: dict[str, Any] = {
    "num_heads": 128,
    "head_dim": 64,
    "state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "expand": 2,
}
_SIZES |= {"layer_norm_epsilon": 1e-5, "max_position_embeddings": _UNLIMITED}


def _of_any(config: Mapping[str, Any]) -> dict[str, Any]:
    layers = count(config, "num_hidden_layers")
    return {**_NO_HEADS, "layer_types": [LINEAR] * layers, "no_rope_layers": [0] * layers}


def _of_folder(config: Mapping[str, Any]) -> dict[str, Any]:
    return own_keys(config, _KEYS) | _of_any(config)


MAMBA2_GGUF = Family("mamba2", branches="one", recurrent=mamba2, fused=("mamba_in",), translated=_of_any)
MAMBA2 = replace(
    MAMBA2_GGUF,
    names={
        **mamba2_names("mixer"),
        "embed": "model.embeddings.weight",
        "norm": "model.norm_f.weight",
        "attn_norm": "norm.weight",
    },
    defaults=_SIZES,
    translated=_of_folder,
)
