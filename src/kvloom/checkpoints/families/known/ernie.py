"""Ernie 4.5: Llama with rotary partners side by side; some of its sizes have experts."""

from dataclasses import replace

from kvloom.checkpoints.families.expert_layers import Mixture
from kvloom.checkpoints.families.family import Family
from kvloom.checkpoints.families.known.mixtures import PLAIN_SHARED

_DEFAULTS = {
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
}
ERNIE = Family("ernie4_5", interleaved=True, defaults={**_DEFAULTS, "head_dim": 128, "num_key_value_heads": 2})
ERNIE_MOE = replace(
    ERNIE,
    name="ernie4_5_moe",
    mixture=Mixture(shared="plain", has_correction=True),
    names={**PLAIN_SHARED, "router_correction": "mlp.moe_statics.e_score_correction_bias"},
    defaults={**_DEFAULTS, "num_key_value_heads": 4, "moe_layer_start_index": 1, "moe_num_shared_experts": 2},
)
