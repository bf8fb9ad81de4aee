"""Nemotron-H: layers of one branch, which is Mamba-2, attention without rotary embedding, an MLP without gate, or
experts of that kind.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvloom.checkpoints.families.expert_layers import Mixture
from kvloom.checkpoints.families.family import Family
from kvloom.checkpoints.families.hybrid import mamba2, mamba2_names
from kvloom.checkpoints.families.known.mixtures import PLAIN_SHARED
from kvloom.checkpoints.families.known.nemotron_config import of_folder, of_gguf
from kvloom.checkpoints.families.values import short
from kvloom.contract.errors import ModelError

_DEFAULTS: dict[str, Any] = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 21504,
}
_DEFAULTS |= {"mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4}
_DEFAULTS |= {"moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688, "num_experts_per_tok": 2}
_DEFAULTS |= {"n_routed_experts": 8, "norm_topk_prob": True, "layer_norm_epsilon": 1e-5}
_DEFAULTS |= {"max_position_embeddings": 4096}
_MLP = {"up": "mixer.up_proj.weight", "down": "mixer.down_proj.weight"}


def _checked(config: Mapping[str, Any]) -> dict[str, Any]:
    for key, only in {"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "moe_latent_size": None}.items():
        if config.get(key, only) != only:
            raise ModelError(f"nemotron_h with {key} {short(config[key])} is not supported")
    return {"activation": "relu2"}


NEMOTRON_GGUF = Family(
    "nemotron_h",
    permuted_gguf=True,
    branches="one",
    recurrent=mamba2,
    mixture=Mixture(None, shared="sized", scores="sigmoid", has_correction=True, is_optional=True),
    fused=("mamba_in",),
    gguf_names={"mlp_norm": "attn_norm.weight"},
    translated=of_gguf,
    fields=_checked,
)
NEMOTRON = replace(
    NEMOTRON_GGUF,
    names={
        **mamba2_names("mixer"),
        **{part: f"mixer.{part}_proj.weight" for part in "qkvo"},
        **_MLP,
        **{f"experts.{part}": name.replace("mixer.", "mixer.experts.{}.") for part, name in _MLP.items()},
        **{name: own.replace("mlp.", "mixer.") for name, own in PLAIN_SHARED.items()},
        "router": "mixer.gate.weight",
        "embed": "model.embeddings.weight",
        "norm": "model.norm_f.weight",
        "attn_norm": "norm.weight",
        "mlp_norm": "norm.weight",
    },
    defaults=_DEFAULTS,
    translated=of_folder,
)
