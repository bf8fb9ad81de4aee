"""Granite 4: Granite 3 with experts or without, in which most layers have Mamba-2. Folders say whether the others have
a rotary embedding, and hold gate and up of the MLP that all tokens pass as one tensor.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvloom.checkpoints.families.hybrid import mamba2, mamba2_names
from kvloom.checkpoints.families.known.granite import GRANITE_MOE, GRANITE_MOE_GGUF, GRANITE_SHARED, shared_size
from kvloom.checkpoints.families.values import count


def _translated(config: Mapping[str, Any]) -> dict[str, Any]:
    found, layers = shared_size(config), count(config, "num_hidden_layers")
    if config.get("layer_types") is None:
        found["layer_types"] = ["linear_attention"] * layers
    return found if config.get("position_embedding_type") == "rope" else {**found, "no_rope_layers": [0] * layers}


GRANITE_HYBRID_GGUF = replace(
    GRANITE_MOE_GGUF, name="granitehybrid", fused=("mamba_in",), recurrent=mamba2, recurrent_kind="linear_attention"
)
GRANITE_HYBRID = replace(
    GRANITE_HYBRID_GGUF,
    stacking="gate_up",
    fused=("mamba_in", "gate_up", "shared_gate_up"),
    names={
        **GRANITE_MOE.names,
        **mamba2_names("mamba"),
        "gate_up": "shared_mlp.input_linear.weight",
        "down": "shared_mlp.output_linear.weight",
    },
    defaults={
        **GRANITE_SHARED.defaults,
        "mamba_n_heads": 128,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    translated=_translated,
)
