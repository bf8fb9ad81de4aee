"""Configurations of Gemma 4, of folders and of GGUF files, in the keys that families read; names of its tensors."""

from collections.abc import Mapping
from typing import Any

from kvloom.checkpoints.families.positions import FULL, LOCAL
from kvloom.checkpoints.families.values import count, short
from kvloom.contract.errors import ModelError

LAYER_NAMES = {
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "layer_embed": "model.embed_tokens_per_layer.weight",
    "layer_mix": "model.per_layer_model_projection.weight",
    "layer_mix_norm": "model.per_layer_projection_norm.weight",
    "input_gate": "per_layer_input_gate.weight",
    "input_out": "per_layer_projection.weight",
    "input_post_norm": "post_per_layer_input_norm.weight",
    "scalar": "layer_scalar",
    "router": "router.proj.weight",
    "router_norm": "router.scale",
    "expert_factors": "router.per_expert_scale",
    "gate_up_experts": "experts.gate_up_proj",
    "down_experts": "experts.down_proj",
    "dense_post_norm": "post_feedforward_layernorm_1.weight",
    "experts_norm": "pre_feedforward_layernorm_2.weight",
    "experts_post_norm": "post_feedforward_layernorm_2.weight",
}
DEFAULTS: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 512,
    "max_position_embeddings": 131072,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
}
UNIFIED: dict[str, Any] = {"sliding_window": 1024, "max_position_embeddings": 262144, "hidden_size_per_layer_input": 0}
_ROPES = {
    LOCAL: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
_PERIOD = 6  # of five layers with a window and one without
_OWN_SIZES = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Raises ModelError."""
    text = config.get("text_config")
    config = {**config, **(text if isinstance(text, Mapping) else {}), "text_config": None}
    if config.get("use_bidirectional_attention") == "vision":  # of images, which nobody shows it
        config["use_bidirectional_attention"] = None
    config["layer_types"] = types = _types(config)
    if "head_dim_swa" in config:
        config |= _of_gguf(config, types)
    else:
        config |= _wide_sizes(config, types) | {"rope_parameters": config.get("rope_parameters") or _ROPES}
    if config.get("enable_moe_block"):
        config["num_experts_per_tok"] = config.get("top_k_experts")
    else:
        config["num_experts"] = 0
    return config


def _types(config: Mapping[str, Any]) -> list[Any]:
    """The kind of each layer; the last one has no window, whatever files say."""
    types, pattern = config.get("layer_types"), config.get("sliding_window_pattern")
    number = count(config, "num_hidden_layers")
    if isinstance(pattern, list):  # GGUF's
        return [LOCAL if is_local else FULL for is_local in pattern]
    if types is None:
        types = [LOCAL if (index + 1) % _PERIOD else FULL for index in range(number)]
    return [*types[:-1], FULL] if isinstance(types, list) and types else types


def _wide_sizes(config: Mapping[str, Any], types: list[Any]) -> dict[str, Any]:
    """Sizes of layers without a window, as folders have them: by layer, or for all. Raises ModelError."""
    by_layer, found = config.get("per_layer_config"), {"global_head_dim": config.get("global_head_dim") or 512}
    if config.get("num_global_key_value_heads") is not None and config.get("attention_k_eq_v"):
        found["num_global_key_value_heads"] = config["num_global_key_value_heads"]
    else:
        found["num_global_key_value_heads"] = None
    if by_layer is None:
        return found
    own = {
        str(index): by_layer.get(str(index), by_layer.get(index)) for index, kind in enumerate(types) if kind == FULL
    }
    if not by_layer.keys() <= own.keys() or len({str(sizes) for sizes in own.values()}) > 1:
        raise ModelError(f"configuration: per_layer_config must be one for all of {FULL}, got {short(by_layer)}")
    sizes = next(iter(own.values())) or {}
    if not isinstance(sizes, Mapping) or not sizes.keys() <= _OWN_SIZES.keys():
        raise ModelError(f"configuration: per_layer_config has {', '.join(_OWN_SIZES)}, got {short(sizes)}")
    return {key: sizes.get(name) for name, key in _OWN_SIZES.items()}


def _of_gguf(config: Mapping[str, Any], types: list[Any]) -> dict[str, Any]:
    """What GGUF files say of both kinds of layers, or of each layer."""
    scaling = config.get("rope_scaling") or {}
    ropes = {
        LOCAL: {"rope_theta": config.get("rope_local_base_freq", 1e4)},
        FULL: {"rope_theta": config.get("rope_theta", 1e6), "freq_factors": scaling.get("freq_factors")},
    }
    found: dict[str, Any] = {
        "head_dim": config["head_dim_swa"],
        "global_head_dim": config.get("head_dim"),
        "rotary_dim": None,  # of a head all are
        "rope_parameters": ropes,
        "rope_scaling": None,
        "enable_moe_block": bool(config.get("num_local_experts")),
        "top_k_experts": config.get("num_experts_per_tok"),
        "vocab_size_per_layer_input": None,  # all
    }
    heads = config.get("num_key_value_heads")
    if isinstance(heads, list):
        of_kind = dict(zip(types, heads, strict=False))
        found |= {"num_key_value_heads": of_kind.get(LOCAL), "num_global_key_value_heads": of_kind.get(FULL)}
    sizes = config.get("intermediate_size")
    if isinstance(sizes, list) and sizes:
        found |= {"intermediate_size": min(sizes), "use_double_wide_mlp": max(sizes) > min(sizes)}
    return found
