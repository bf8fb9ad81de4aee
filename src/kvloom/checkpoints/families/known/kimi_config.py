"""Configurations of Kimi-Linear."""

from collections.abc import Mapping
from typing import Any

from kvloom.checkpoints.families.hybrid import FULL, LINEAR
from kvloom.checkpoints.families.known.deepseek import SIZES
from kvloom.checkpoints.families.known.deepseek_gguf import of_gguf
from kvloom.checkpoints.families.known.glm_flash import dense_layers
from kvloom.checkpoints.families.latents import latent_sizes
from kvloom.checkpoints.families.values import count, flag, short
from kvloom.contract.errors import ModelError

_KEYS = {"max_position_embeddings": "model_max_length", "norm_topk_prob": "moe_renormalize"}
_KEYS |= {"n_group": "num_expert_group", "num_experts_per_tok": "num_experts_per_token"}
_DELTA = {"linear_head_dim": "head_dim", "linear_num_heads": "num_heads"}
_DELTA |= {"linear_conv_kernel_dim": "short_conv_kernel_size"}  # of linear_attn_config
DEFAULTS: dict[str, Any] = {**SIZES, "q_lora_rank": None, "rms_norm_eps": 1e-5, "intermediate_size": 9216}
DEFAULTS |= {"num_attention_heads": 32, "model_max_length": 1 << 20, "moe_renormalize": True, "num_expert_group": 1}
DEFAULTS |= {"num_experts_per_token": 8, "num_experts": 256, "num_shared_experts": 1, "moe_intermediate_size": 1024}
DEFAULTS |= {"routed_scaling_factor": 2.446, "linear_head_dim": 128, "linear_num_heads": 32}
DEFAULTS |= {"linear_conv_kernel_dim": 4, "topk_group": 1, "first_k_dense_replace": 1}


def _of_any(config: Mapping[str, Any]) -> dict[str, Any]:
    """Attention has no positions."""
    return {**latent_sizes(config), "no_rope_layers": [0] * count(config, "num_hidden_layers")}


def _delta(config: Mapping[str, Any], layers: int) -> tuple[Mapping[str, Any], list[int]]:
    """linear_attn_config, and the numbers of the layers with full attention, from 1 on. Raises ModelError."""
    own = config.get("linear_attn_config") or {}
    if not isinstance(own, Mapping):
        raise ModelError(f"configuration: linear_attn_config must be an object, got {short(own)}")
    full = own.get("full_attn_layers", [*range(5, layers + 1, 4)])
    if not isinstance(full, list) or any(type(number) is not int or not 0 < number <= layers for number in full):
        raise ModelError(f"configuration: full_attn_layers must be numbers of layers, 1 to {layers}, got {short(full)}")
    return own, full


def kimi_folder(config: Mapping[str, Any]) -> dict[str, Any]:
    """Published configurations have sizes and layers of delta attention apart, and count layers from 1."""
    if not flag(config, "mla_use_nope", default=True):
        raise ModelError("kimi_linear with mla_use_nope false is not supported")
    layers = count(config, "num_hidden_layers")
    own, full = _delta(config, layers)
    found = {ours: config.get(ours, config[theirs]) for ours, theirs in _KEYS.items()}
    found |= {ours: own[theirs] for ours, theirs in _DELTA.items() if theirs in own}
    found |= dense_layers(config) if config.get("mlp_layer_types") else {}
    types = config.get("layer_types") or [FULL if index + 1 in full else LINEAR for index in range(layers)]
    return _of_any(config) | found | {"layer_types": types}


def kimi_gguf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Files have as many heads in all layers."""
    sizes = of_gguf(config)
    return sizes | _of_any({**config, **sizes}) | {"linear_num_heads": config.get("num_attention_heads")}
