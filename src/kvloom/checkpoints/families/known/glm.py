"""GLM-4: biases on q, k and v, a half of each head rotated, norms around each branch; GLM-4 9B of 2024 without them.

GLM-4.5 to 4.7 have experts, as DeepSeek-V3 chooses them, and rotary partners in halves.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvloom.checkpoints.families.expert_layers import Mixture
from kvloom.checkpoints.families.family import Family
from kvloom.checkpoints.families.known.mixtures import PLAIN_SHARED
from kvloom.checkpoints.families.values import flag

_DEFAULTS = {"partial_rotary_factor": 0.5, "max_position_embeddings": 131072}


def _biases(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"qkv_bias": flag(config, "attention_bias", default=True)}


GLM = Family(
    "glm",
    interleaved=True,
    fused=("gate_up",),
    defaults={
        **_DEFAULTS,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-07,
        "num_key_value_heads": 2,
    },
    fields=_biases,
)
GLM4 = replace(
    GLM,
    name="glm4",
    norms="both",
    names={
        "attn_post_norm": "post_self_attn_layernorm.weight",
        "mlp_norm": "post_attention_layernorm.weight",
        "mlp_post_norm": "post_mlp_layernorm.weight",
    },
)


def _of_experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """GGUF files tell norms on q and k by their tensors, configurations by use_qk_norm."""
    return {"qkv_bias": flag(config, "attention_bias"), "qk_norm": "head" if flag(config, "use_qk_norm") else ""}


GLM4_MOE = Family(
    "glm4_moe",
    mixture=Mixture(weighs_chosen=None, shared="plain", scores="sigmoid", has_correction=True),
    names=PLAIN_SHARED,
    gguf_names={"mlp_norm": "post_attention_norm.weight"},
    defaults={
        **_DEFAULTS,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
    },
    fields=_of_experts,
)
