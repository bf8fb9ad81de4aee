"""Tiny random models made with transformers, the oracle; and a harness that runs a backend with paged blocks."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from kvloom.rank.kernels.backend import Backend
from tests.engine.kernels.models import all_logits, ragged
from tests.support.lazily import lazily

transformers = lazily("transformers")

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


def longrope(trained_len: int) -> dict[str, Any]:
    """A rope scaling of kind longrope, for heads of which 8 dimensions are rotated."""
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "long_factor": [1.5, 2.0, 3.0, 4.0],
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "original_max_position_embeddings": trained_len,
    }


GROWING = {**YARN_ROPE, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.3}
GROWING |= {"mscale": 1.0, "mscale_all_dim": 1.0}
LOCAL, FULL = "sliding_attention", "full_attention"
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
MULTIPLIERS = {"embedding_multiplier": 6.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4}
MULTIPLIERS |= {"logits_scaling": 3.0}

TINY_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "llama, one kv head": ("Llama", {"num_key_value_heads": 1}),
    "llama, llama3 rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama, yarn rope": ("Llama", {"rope_parameters": YARN_ROPE}),
    "llama, linear rope": ("Llama", {"rope_parameters": LINEAR_ROPE}),
    "mistral, window of 7": ("Mistral", {"sliding_window": 7}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2, tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3, yarn rope": ("Qwen3", {"head_dim": 32, "rope_parameters": YARN_ROPE}),
    "ministral3": ("Ministral3", {"head_dim": 16, "rope_parameters": GROWING}),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 32}),
    "hunyuan, longer base": (
        "HunYuanDenseV1",
        {"head_dim": 32, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}},
    ),
    "qwen2, two layers of three with a window": (
        "Qwen2",
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "ministral": (
        "Ministral",
        {"head_dim": 16, "num_hidden_layers": 3, "sliding_window": 7, "layer_types": [LOCAL, FULL, LOCAL]},
    ),
    "glm": ("Glm", {"head_dim": 32}),
    "glm4": ("Glm4", {"head_dim": 32}),
    "glm4, without biases": ("Glm4", {"head_dim": 16, "attention_bias": False}),
    "ernie": ("Ernie4_5", {"head_dim": 32}),
    "seed": ("SeedOss", {"head_dim": 32}),
    "seed, biases behind attention too": ("SeedOss", {"head_dim": 32, "attention_out_bias": True}),
    "exaone4": ("Exaone4", {"num_hidden_layers": 4, "sliding_window": 7, "rope_parameters": LLAMA3_ROPE}),
    "exaone4, no window": ("Exaone4", {"sliding_window": None, "layer_types": [FULL, FULL]}),
    "gemma": ("Gemma", {"head_dim": 32}),
    "gemma2": (
        "Gemma2",
        {
            "num_hidden_layers": 3,
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 7,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "num_hidden_layers": 3,
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 7,
            "layer_types": [LOCAL, FULL, LOCAL],
            "rope_parameters": {LOCAL: {**DEFAULT_ROPE, "rope_theta": 100.0}, FULL: LINEAR_ROPE},
        },
    ),
    "phi3": ("Phi3", {"rope_parameters": {**DEFAULT_ROPE, "partial_rotary_factor": 0.5}, "sliding_window": 11}),
    "phi3, long rope": ("Phi3", {"original_max_position_embeddings": 16, "rope_parameters": longrope(16)}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4}),
    "granite": ("Granite", MULTIPLIERS),
    "olmo2": ("Olmo2", {}),
    "olmo3": (
        "Olmo3",
        {
            "num_hidden_layers": 4,
            "sliding_window": 7,
            "rope_parameters": {LOCAL: DEFAULT_ROPE, FULL: YARN_ROPE},
        },
    ),
}
EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}
QWEN_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
GLM_EXPERTS = {"head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
ERNIE_EXPERTS = {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 40}
TINY_MODELS |= {
    "mixtral": ("Mixtral", EXPERTS),
    "qwen3 moe": ("Qwen3Moe", {**QWEN_EXPERTS, "head_dim": 32, "norm_topk_prob": True}),
    "qwen3 moe, a dense layer": (
        "Qwen3Moe",
        {**QWEN_EXPERTS, "head_dim": 32, "num_hidden_layers": 3, "mlp_only_layers": [1], "norm_topk_prob": False},
    ),
    "qwen2 moe": ("Qwen2Moe", {**QWEN_EXPERTS, "shared_expert_intermediate_size": 72}),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "eos_token_id": 1}),
    "granite moe": ("GraniteMoe", {**EXPERTS, **MULTIPLIERS}),
    "glm4 moe": ("Glm4Moe", {**GLM_EXPERTS, "num_hidden_layers": 3, "use_qk_norm": True}),
    "glm4 moe, groups, biases": (
        "Glm4Moe",
        {**GLM_EXPERTS, "n_group": 4, "topk_group": 2, "attention_bias": True, "routed_scaling_factor": 2.5},
    ),
    "glm4 moe, scores as they are": ("Glm4Moe", {**GLM_EXPERTS, "norm_topk_prob": False, "n_shared_experts": 2}),
    "ernie moe": ("Ernie4_5_Moe", ERNIE_EXPERTS),
    "ernie moe, without shared experts": ("Ernie4_5_Moe", {**ERNIE_EXPERTS, "moe_num_shared_experts": 0}),
    "ernie moe, every second layer": (
        "Ernie4_5_Moe",
        {**ERNIE_EXPERTS, "num_hidden_layers": 5, "moe_layer_interval": 2, "moe_layer_end_index": 3},
    ),
    "gpt-oss": (
        "GptOss",
        {
            **EXPERTS,
            "num_hidden_layers": 3,
            "head_dim": 32,
            "sliding_window": 7,
            "swiglu_limit": 1.5,
            "rope_parameters": {**YARN_ROPE, "truncate": False},
        },
    ),
}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
DELTA |= {"linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "head_dim": 32, "num_hidden_layers": 4}
DELTA |= {"initializer_range": 0.2}
DELTA_EXPERTS = {**DELTA, **QWEN_EXPERTS, "shared_expert_intermediate_size": 72}
STATE, INTERVAL = "linear_attention", {"layer_types": None, "full_attention_interval": 2}
TINY_MODELS |= {
    "qwen3.5": ("Qwen3_5Text", DELTA),
    "qwen3.5, a head of values each, tied": (
        "Qwen3_5Text",
        {**DELTA, "linear_num_value_heads": 2, "linear_value_head_dim": 32, "tie_word_embeddings": True},
    ),
    "qwen3.5, a state last": (
        "Qwen3_5Text",
        {**DELTA, "num_hidden_layers": 3, "layer_types": [STATE, FULL, STATE], "linear_conv_kernel_dim": 3},
    ),
    "qwen3.5, every second layer": ("Qwen3_5Text", {**DELTA, **INTERVAL}),
    "qwen3.5 moe": ("Qwen3_5MoeText", DELTA_EXPERTS),
    "qwen3 next": ("Qwen3Next", DELTA_EXPERTS),
    "qwen3 next, a dense layer": ("Qwen3Next", {**DELTA_EXPERTS, "mlp_only_layers": [1], "norm_topk_prob": False}),
}
TIED = {"tie_word_embeddings": True}
SHORT = {"num_hidden_layers": 4, "layer_types": ["conv", FULL, "conv", "conv"], "tie_word_embeddings": False}
TINY_MODELS |= {
    "lfm2": ("Lfm2", {**SHORT, "block_multiple_of": 32}),
    "lfm2, tied, sizes as they are": (
        "Lfm2",
        {**SHORT, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False, "tie_word_embeddings": True},
    ),
    "lfm2 moe": ("Lfm2Moe", {**SHORT, **QWEN_EXPERTS, "num_dense_layers": 1, **TIED}),
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 2, "num_hidden_layers": 4}
MAMBA |= {**MULTIPLIERS, "layer_types": [STATE, FULL, STATE, STATE], "initializer_range": 0.2}
TINY_MODELS |= {
    "granite shared": ("GraniteMoeShared", {**EXPERTS, **MULTIPLIERS, "shared_intermediate_size": 72}),
    "granite 4": ("GraniteMoeHybrid", {**MAMBA, **EXPERTS, "shared_intermediate_size": 72}),
    "granite 4, dense, rotated": (
        "GraniteMoeHybrid",
        {
            **MAMBA,
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
            "position_embedding_type": "rope",
            "mamba_n_groups": 1,
            "mamba_conv_bias": False,
            "mamba_d_conv": 3,
            "time_step_limit": [0.1, 1.0],
            "tie_word_embeddings": True,
        },
    ),
    "granite 4, attention alone": (
        "GraniteMoeHybrid",
        {**MAMBA, "layer_types": [FULL] * 4, "num_local_experts": 0, "shared_intermediate_size": 96},
    ),
}
NEMOTRON = {"mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 16, "head_dim": 32}
NEMOTRON |= {"n_routed_experts": 6, "moe_intermediate_size": 40, "moe_shared_expert_intermediate_size": 72}
NEMOTRON |= {"initializer_range": 0.2}
TINY_MODELS |= {
    "nemotron h": ("NemotronH", {**NEMOTRON, "layers_block_type": [STATE, "mlp", FULL, "mlp", STATE]}),
    "nemotron h, experts": (
        "NemotronH",
        {**NEMOTRON, "layers_block_type": [STATE, FULL, "moe", STATE, "moe"], "routed_scaling_factor": 2.5},
    ),
    "mamba2": (
        "Mamba2",
        {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 2, "initializer_range": 0.2, "expand": 2},
    ),
}
FALCON = {"mamba_n_heads": 4, "mamba_d_head": 24, "mamba_d_ssm": 96, "mamba_d_state": 16, "mamba_n_groups": 2}
FALCON |= {"initializer_range": 0.2, "mamba_norm_before_gate": False}
TINY_MODELS |= {
    "falcon h1": (
        "FalconH1",
        {
            **FALCON,
            "embedding_multiplier": 2.5,
            "lm_head_multiplier": 0.4,
            "key_multiplier": 0.7,
            "attention_in_multiplier": 1.3,
            "attention_out_multiplier": 0.8,
            "mlp_multipliers": [1.2, 0.6],
            "ssm_multipliers": [0.5, 1.5, 0.8, 1.25, 0.9],
            "ssm_in_multiplier": 1.1,
            "ssm_out_multiplier": 0.7,
        },
    ),
    "falcon h1, norms": ("FalconH1", {**FALCON, "mamba_rms_norm": True, "tie_word_embeddings": True}),
}
GEMMA4 = {"head_dim": 32, "global_head_dim": 64, "sliding_window": 7, "hidden_size_per_layer_input": 0, **TIED}
INPUTS = {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 128}
TINY_MODELS |= {
    "gemma4, shared keys and inputs of layers": (  # as E2B and E4B
        "Gemma4Text",
        {
            **GEMMA4,
            **INPUTS,
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "layer_types": [LOCAL, LOCAL, FULL, LOCAL, LOCAL, FULL],
        },
    ),
    "gemma4, values from keys": (  # as 31B
        "Gemma4Text",
        {
            **GEMMA4,
            "num_hidden_layers": 3,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "layer_types": [LOCAL, FULL, FULL],
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma4, unified": (
        "Gemma4UnifiedText",
        {"head_dim": 32, "global_head_dim": 64, "sliding_window": 7, "layer_types": [LOCAL, FULL], **TIED},
    ),
    "gemma4, experts beside an MLP": (  # as 26B-A4B
        "Gemma4Text",
        {
            **GEMMA4,
            "num_hidden_layers": 7,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 40,
        },
    ),
}
LATENT = {"kv_lora_rank": 64, "q_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
LATENT |= {"num_key_value_heads": 4, "num_hidden_layers": 3, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}
LATENT |= {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_shared_experts": 1}
LATENT_EXPERTS = ("routed_scaling_factor", "first_k_dense_replace", "n_routed_experts", "num_experts_per_tok")
LATENT_EXPERTS += ("moe_intermediate_size", "n_shared_experts")
LATENT_YARN = {**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 0.7}
TINY_MODELS |= {
    "deepseek v2, lite": ("DeepseekV2", {**LATENT, "q_lora_rank": None, "rope_parameters": LATENT_YARN}),
    "deepseek v2": (
        "DeepseekV2",
        {**LATENT, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "v_head_dim": 64},
    ),
    "deepseek v3": ("DeepseekV3", {**LATENT, "n_group": 4, "topk_group": 2, "rope_parameters": LATENT_YARN}),
    "deepseek v3, partners in halves": (
        "DeepseekV3",
        {**LATENT, "n_group": 1, "topk_group": 1, "rope_interleave": False},
    ),
    "glm4 moe lite": ("Glm4MoeLite", {**LATENT, "qk_nope_head_dim": 64, "v_head_dim": 64}),
    "glm4 moe lite, dense layers": (
        "Glm4MoeLite",
        {**LATENT, "mlp_layer_types": ["sparse", "dense", "sparse"], "norm_topk_prob": False},
    ),
    "mistral4": ("Mistral4", {**LATENT, "n_group": 2, "topk_group": 1, "rope_parameters": GROWING}),
    "youtu": ("Youtu", {key: LATENT[key] for key in LATENT if key not in LATENT_EXPERTS}),
}
KIMI = {key: LATENT[key] for key in LATENT if key not in ("n_routed_experts", "first_k_dense_replace")}
KIMI |= {
    "num_local_experts": 8,
    "q_lora_rank": None,
    "num_hidden_layers": 4,
    "layer_types": [STATE, FULL, STATE, STATE],
}
KIMI |= {"linear_num_heads": 2, "linear_head_dim": 32, "bos_token_id": 1, "eos_token_id": 2}
TINY_MODELS |= {
    "kimi linear": ("KimiLinear", KIMI),
    "kimi linear, groups, latents of queries": (
        "KimiLinear",
        {
            **KIMI,
            "linear_conv_kernel_dim": 3,
            "q_lora_rank": 64,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
        },
    ),
}
VOCAB_SIZE = 128
BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}


def tiny_model(name: str, **fields: Any) -> transformers.PreTrainedModel:
    """A random model of a family, its biases and norms random too. `fields` override its configuration."""
    family, own = TINY_MODELS[name]
    config = getattr(transformers, f"{family}Config")(**deepcopy({**BASE, **own, **fields}))  # it changes its values
    torch.manual_seed(0)
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
    model.set_attn_implementation("eager")  # other attention implementations ignore soft caps
    for key, parameter in (*model.named_parameters(), *model.named_buffers()):
        if key.endswith("inv_freq"):
            continue
        if key.endswith(("e_score_correction_bias", "expert_bias")):
            torch.nn.init.normal_(parameter, std=0.2)
        elif key.endswith("A_log"):  # decays of all kinds, none of which forgets at once
            torch.nn.init.uniform_(parameter, -4.0, 0.5)
        elif key.endswith(("bias", "sinks", ".D")):
            torch.nn.init.normal_(parameter)
        elif ".experts." in key or ".router." in key or ".gate.weight" in key:
            torch.nn.init.normal_(parameter, std=BASE["initializer_range"])  # transformers initialises some to zero
        elif key.endswith("layer_scalar"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif key.endswith(("norm.weight", "norm_1.weight", "norm_2.weight")):
            parameter.data += 0.2 * torch.randn_like(parameter)
    return model


def save(model: transformers.PreTrainedModel, folder: Path, max_shard_size: str = "60KB") -> Path:
    """Saves a model as a Hugging Face folder of several safetensors files."""
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def run_step(
    backend: Backend,
    seqs: Sequence[Sequence[int]],
    tables: Sequence[Sequence[int]],
    starts: Sequence[int] | None = None,
) -> torch.Tensor:
    """Logits of every token of a ragged step: seqs[i] from position starts[i] on, in the blocks of tables[i]."""
    starts = starts or [0] * len(seqs)
    parts = [(list(seq), start, list(table)) for seq, start, table in zip(seqs, starts, tables, strict=True)]
    return all_logits(backend, *ragged(parts))


def generate(backend: Backend, prompt: Sequence[int], num_tokens: int, table: Sequence[int]) -> list[int]:
    """The first `num_tokens` greedy tokens. The prompt is computed in one step, then one token per step."""
    tokens = [int(run_step(backend, [prompt], [table])[-1].argmax())]
    for pos in range(len(prompt), len(prompt) + num_tokens - 1):
        tokens.append(int(run_step(backend, [tokens[-1:]], [table], [pos])[-1].argmax()))
    return tokens
