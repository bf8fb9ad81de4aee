"""Gemma 4 of transformers as llama.cpp's converter writes it into GGUF files."""

from typing import Any

import numpy as np

NAMES = {
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "post_per_layer_input_norm": "post_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "layer_scalar": "layer_output_scale.weight",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "router.proj": "ffn_gate_inp",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}


def metadata_of(config: Any) -> dict[str, Any]:
    """What such files say besides the sizes that all have."""
    types = config.layer_types
    local, sizes = (config.per_layer_config[types.index(kind)] for kind in ("sliding_attention", "full_attention"))
    is_local = [kind == "sliding_attention" for kind in types]
    first = config.num_hidden_layers - config.num_kv_shared_layers
    own: dict[str, Any] = {
        "attention__key_length": sizes.head_dim,
        "attention__value_length": sizes.head_dim,
        "attention__key_length_swa": local.head_dim,
        "attention__value_length_swa": local.head_dim,
        "attention__head_count_kv": [(local if one else sizes).num_key_value_heads for one in is_local],
        "attention__sliding_window": config.sliding_window,
        "attention__sliding_window_pattern": is_local,
        "attention__shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "rope__dimension_count": sizes.head_dim,
        "rope__dimension_count_swa": local.head_dim,
        "rope__freq_base_swa": 10000.0,
        "final_logit_softcapping": config.final_logit_softcapping or 0.0,
    }
    if config.use_double_wide_mlp:
        size = config.intermediate_size
        own["feed_forward_length"] = [size if layer < first else 2 * size for layer in range(len(types))]
    if config.enable_moe_block:
        own |= {"expert_count": config.num_experts, "expert_used_count": config.top_k_experts}
        own["expert_feed_forward_length"] = config.moe_intermediate_size
    return {f"gemma4__{key}": value for key, value in own.items()}


def rope_divisors(config: Any) -> np.ndarray[Any, Any]:
    """Of layers without a window: a quarter of the frequencies is used."""
    half = config.per_layer_config[config.layer_types.index("full_attention")].head_dim // 2
    return np.array([1.0] * (half // 4) + [1e30] * (half - half // 4), np.float32)
