"""Model families: what their configurations mean, and what their GGUF files leave out."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.checkpoints.families import FAMILIES
from kvloom.checkpoints.families.rope import build_rope
from kvloom.contract.errors import ModelError
from kvloom.rank.kernels.reference import ReferenceBackend
from tests.support.lazily import lazily
from tests.support.models.checkpoints import DEFAULT_ROPE, longrope, run_step, save, tiny_model

from .test_gguf import write

transformers = lazily("transformers")

TOKENS = [5, 9, 1, 77, 30, 2, 2, 101, 64, 3, 18, 90, 11, 12, 13, 14]
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}
GEMMA2 = {"attention__sliding_window": 7, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
GEMMA3 = {
    "attention__sliding_window": 7,
    "attention__sliding_window_pattern": [True, False, True],
    "rope__freq_base_swa": 100.0,
    "rope__scaling__type": "linear",
    "rope__scaling__factor": 2.0,
}
GRANITE = {"embedding_scale": 6.0, "attention__scale": 0.2, "residual_scale": 0.4, "logit_scale": 3.0}
OLMO3 = {
    "attention__sliding_window": 7,
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 4.0,
    "rope__scaling__original_context_length": 64,
}
MOE = {"expert_count": 5, "expert_used_count": 2}
QWEN_MOE = {"expert_count": 6, "expert_used_count": 3, "expert_feed_forward_length": 40}
GLM_MOE = {
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_feed_forward_length": 40,
    "expert_shared_count": 1,
    "expert_gating_func": 2,
    "expert_weights_norm": True,
    "leading_dense_block_count": 1,
    "rope__dimension_count": 16,
}
ERNIE_MOE = {
    "expert_count": 6,
    "expert_used_count": 2,
    "expert_feed_forward_length": 40,
    "expert_shared_count": 2,
    "expert_shared_feed_forward_length": 48,  # what the converter computes of other sizes, and nobody may read
    "leading_dense_block_count": 1,
    "interleave_moe_layer_step": 1,
}
MISTRAL3 = {
    "attention__temperature_scale": 0.3,
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 4.0,
    "rope__scaling__original_context_length": 8,
    "rope__scaling__yarn_log_multiplier": 1.0,
}
GPT_OSS = {
    **MOE,
    "attention__sliding_window": 7,
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 4.0,
    "rope__scaling__original_context_length": 64,
}
LFM2_MOE = {"expert_gating_func": 2, "leading_dense_block_count": 1, "shortconv__l_cache": 3}
NEMOTRON = {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 40, "expert_weights_scale": 2.5}
NEMOTRON |= {"expert_shared_feed_forward_length": 72, "expert_weights_norm": True, "expert_group_count": 1}
FILES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # by tiny model: architecture, metadata, configuration
    "glm4": ("glm4", {"rope__dimension_count": 16}, {}),
    "ernie": ("ernie4_5", {}, {}),
    "seed": ("seed_oss", {}, {}),
    "seed, biases behind attention too": ("seed_oss", {}, {}),
    "exaone4": ("exaone4", {"attention__sliding_window": 7}, {"rope_parameters": DEFAULT_ROPE}),
    "exaone4, no window": ("exaone4", {}, {}),
    "gemma": ("gemma", {}, {}),
    "gemma2": ("gemma2", GEMMA2, {"query_pre_attn_scalar": 32}),
    "gemma3": ("gemma3", GEMMA3, {"query_pre_attn_scalar": 32}),
    "phi3": ("phi3", {"attention__sliding_window": 11, "rope__dimension_count": 8}, {}),
    "smollm3": ("smollm3", {}, {}),
    "granite": ("granite", GRANITE, {}),
    "olmo2": ("olmo2", {}, {}),
    "olmo3": ("olmo2", OLMO3, {}),
    "mixtral": ("llama", MOE, {}),
    "qwen3 moe": ("qwen3moe", QWEN_MOE, {}),
    "qwen2 moe": ("qwen2moe", {**QWEN_MOE, "expert_shared_feed_forward_length": 72}, {}),
    "olmoe": ("olmoe", {"expert_count": 6, "expert_used_count": 2}, {}),
    "granite moe": ("granitemoe", GRANITE | MOE, {}),
    "granite shared": ("granitemoe", GRANITE | MOE, {}),
    "granite 4": ("granitehybrid", GRANITE | MOE, {}),
    "granite 4, dense, rotated": ("granitehybrid", GRANITE, {"time_step_limit": [0.0, 9.0]}),
    "granite 4, attention alone": ("granite", GRANITE, {"position_embedding_type": "rope"}),
    "glm4 moe": ("glm4moe", {**GLM_MOE, "block_count": 4, "nextn_predict_layers": 1}, {}),
    "glm4 moe, groups, biases": (
        "glm4moe",
        {**GLM_MOE, "expert_group_count": 4, "expert_group_used_count": 2, "expert_weights_scale": 2.5},
        {},
    ),
    "ernie moe": ("ernie4_5-moe", ERNIE_MOE, {}),
    "ernie moe, every second layer": (
        "ernie4_5-moe",
        {**ERNIE_MOE, "interleave_moe_layer_step": 2},
        {"moe_layer_end_index": -1},
    ),
    "hunyuan": ("hunyuan-dense", {}, {}),
    "ministral3": ("mistral3", MISTRAL3, {}),
    "lfm2": ("lfm2", {"shortconv__l_cache": 3}, {}),
    "lfm2, tied, sizes as they are": ("lfm2", {"shortconv__l_cache": 4}, {}),
    "lfm2 moe": ("lfm2moe", {**QWEN_MOE, **LFM2_MOE}, {}),
    "gemma4, shared keys and inputs of layers": ("gemma4", {}, {}),
    "gemma4, values from keys": ("gemma4", {}, {}),
    "gemma4, experts beside an MLP": ("gemma4", {}, {}),
    "qwen3.5": ("qwen35", {}, {}),
    "qwen3.5, a head of values each, tied": ("qwen35", {}, {}),
    "qwen3.5, a state last": ("qwen35", {}, {}),
    "qwen3.5, every second layer": ("qwen35", {"nextn_predict_layers": 1, "block_count": 5}, {}),
    "qwen3.5 moe": ("qwen35moe", {**QWEN_MOE, "expert_shared_feed_forward_length": 72}, {}),
    "qwen3 next": ("qwen3next", {**QWEN_MOE, "expert_shared_feed_forward_length": 72}, {}),
    "falcon h1, norms": ("falcon-h1", {}, {}),
    "nemotron h": ("nemotron_h", {}, {}),
    "nemotron h, experts": ("nemotron_h_moe", NEMOTRON, {}),
    "mamba2": ("mamba2", {}, {}),
    "deepseek v2, lite": ("deepseek2", {}, {}),
    "deepseek v2": ("deepseek2", {"expert_gating_func": 1}, {}),
    "deepseek v3": ("deepseek2", {"expert_gating_func": 2, "block_count": 4, "nextn_predict_layers": 1}, {}),
    "glm4 moe lite": ("deepseek2", {}, {"rope_parameters": DEFAULT_ROPE}),
    "mistral4": ("mistral4", {"attention__temperature_scale": 0.3}, {}),
    "youtu": ("deepseek2", {}, {}),
    "kimi linear": ("kimi-linear", {}, {"linear_num_heads": 4}),
    "gpt-oss": ("gpt-oss", GPT_OSS, {"swiglu_limit": 7.0}),
}


def logits_of(path: Path) -> torch.Tensor:
    checkpoint = open_checkpoint(path)
    return run_step(ReferenceBackend(checkpoint.spec, checkpoint.weights, 4), [TOKENS], [[2]])


@pytest.mark.parametrize("name", FILES)
def test_a_gguf_file_of_each_family_gives_the_logits_of_its_model(name, tmp_path):
    arch, metadata, fields = FILES[name]
    model = tiny_model(name, **fields)
    path = write(tmp_path / "m.gguf", model, arch, **{f"{arch}__{key}": value for key, value in metadata.items()})
    with torch.no_grad():
        wanted = model(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits_of(path), wanted, atol=2e-4, rtol=1e-4)


def test_a_file_says_that_its_tokens_see_those_behind_them(tmp_path):
    path = write(tmp_path / "m.gguf", tiny_model("qwen3"), "qwen3", qwen3__attention__causal=False)
    assert open_checkpoint(path).spec.sees_ahead


def test_a_model_that_reads_pictures_too_is_opened_for_its_text(tmp_path):
    model = tiny_model("gemma3")
    folder = save(model, tmp_path, "1GB")
    path = folder / "model.safetensors"
    save_file({f"language_model.{key}": value for key, value in load_file(path).items()}, path)
    text = (folder / "config.json").read_text(encoding="utf-8")
    whole = f'{{"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "text_config": {text}}}'
    (folder / "config.json").write_text(whole, encoding="utf-8")
    with torch.no_grad():
        wanted = model(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits_of(folder), wanted, atol=2e-4, rtol=1e-4)


def test_of_mistral_3_the_text_is_served(tmp_path):
    text = {**tiny_model("mistral").config.to_dict(), "head_dim": 16, "num_hidden_layers": 2}
    sight = {"model_type": "pixtral", "num_hidden_layers": 1, "image_size": 32, "patch_size": 16, "head_dim": 16}
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    config = transformers.Mistral3Config(text_config=text, vision_config=sight | sizes, tie_word_embeddings=False)
    torch.manual_seed(0)
    model = transformers.Mistral3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        wanted = model(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits_of(save(model, tmp_path / "apart")), wanted, atol=2e-4, rtol=1e-4)
    model.config.tie_word_embeddings = True  # what the text's part says otherwise
    model.lm_head.weight = model.model.language_model.embed_tokens.weight
    with torch.no_grad():
        wanted = model(torch.tensor([TOKENS])).logits[0]
    checkpoint = open_checkpoint(save(model, tmp_path / "tied"))
    assert (checkpoint.spec.tie_embeddings, checkpoint.unread) == (True, ())
    torch.testing.assert_close(logits_of(checkpoint.path), wanted, atol=2e-4, rtol=1e-4)


def test_long_rope_takes_the_short_factors_where_no_sequence_is_longer_than_the_trained_context(tmp_path):
    fields = {"original_max_position_embeddings": 64, "rope_parameters": longrope(64)}
    model = tiny_model("phi3, long rope", **fields)
    checkpoint = open_checkpoint(save(model, tmp_path))
    with torch.no_grad():
        wanted = model(torch.tensor([TOKENS])).logits[0]
    short = ReferenceBackend(checkpoint.spec.served(64), checkpoint.weights, 4)
    torch.testing.assert_close(run_step(short, [TOKENS], [[2]]), wanted, atol=2e-4, rtol=1e-4)
    assert checkpoint.spec.served(65) is checkpoint.spec
    assert checkpoint.spec.layers[0].mixer.rope.inv_freq != checkpoint.spec.served(64).layers[0].mixer.rope.inv_freq


@pytest.mark.parametrize(
    ("arch", "more", "windows"),
    [
        ("MistralForCausalLM", {"num_key_value_heads": 2, "sliding_window": 9}, [9] * 8),
        ("MistralForCausalLM", {"num_key_value_heads": 2, "sliding_window": None}, [None] * 8),
        ("MistralForCausalLM", {"num_key_value_heads": 2}, [4096] * 8),
        ("Qwen2ForCausalLM", {"sliding_window": 9}, [None] * 8),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 6},
            [None] * 6 + [9] * 2,
        ),
        ("Gemma2ForCausalLM", {"sliding_window": 9}, [9, None] * 4),
        ("Gemma3ForCausalLM", {"sliding_window": 9}, [9] * 5 + [None] + [9] * 2),
        ("Gemma3ForCausalLM", {"sliding_window": 9, "sliding_window_pattern": 2}, [9, None] * 4),
        ("Olmo2ForCausalLM", {}, [None] * 8),
        ("Olmo3ForCausalLM", {"sliding_window": 9}, [9, 9, 9, None] * 2),
        ("Olmo3ForCausalLM", {"sliding_window": 9, "layer_types": ["full_attention"] * 8}, [None] * 8),
    ],
)
def test_which_layers_have_a_window(arch, more, windows):
    assert [layer.mixer.window for layer in FAMILIES[arch].spec(SHAPE | more).layers] == windows


def test_an_older_gemma3_configuration_gives_local_layers_their_own_base_and_no_scaling():
    older = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    layers = FAMILIES["Gemma3ForCausalLM"].spec(SHAPE | older | {"head_dim": 32}).layers
    assert layers[0].mixer.rope == build_rope(32, 1e4, {}, 256)
    assert layers[5].mixer.rope == build_rope(32, 1e6, {"rope_type": "linear", "factor": 8.0}, 256)


def test_every_fourth_layer_of_smollm3_has_no_rope_where_the_configuration_is_silent():
    layers = FAMILIES["smollm3"].spec(SHAPE).layers
    assert [layer.mixer.rope is None for layer in layers] == [False, False, False, True] * 2


@pytest.mark.parametrize(("layers", "scale"), [(46, 16**-0.5), (26, 32**-0.5)])
def test_the_gguf_file_of_gemma2_27b_does_not_say_that_its_scale_is_another(layers, scale):
    spec = FAMILIES["gemma2"].spec(SHAPE | {"num_hidden_layers": layers, "head_dim": 32})
    assert spec.attention_scale == scale


GLM_SHAPE = {"num_key_value_heads": 2, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
PLAIN = {"rope_type": "default", "rope_theta": 1e6}


@pytest.mark.parametrize(
    ("more", "theta"),
    [
        ({"rope_parameters": PLAIN}, 1e6),
        ({"rope_parameters": PLAIN, "rope_scaling": None}, 1e6),
        ({"rope_parameters": PLAIN, "rope_theta": 5.0, "rope_scaling": {"type": "default", "factor": None}}, 1e6),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {**PLAIN, "mrope_section": [3, 3, 2], "mrope_interleaved": True}}, 1e6),
    ],
)
def test_settings_of_the_rotary_embedding_that_say_the_same_are_read(more, theta):
    layers = FAMILIES["Qwen2ForCausalLM"].spec(SHAPE | {"head_dim": 32} | more).layers
    assert layers[0].mixer.rope == build_rope(32, theta, {}, 256)


@pytest.mark.parametrize(
    ("arch", "more", "problem"),
    [
        (
            "LlamaForCausalLM",
            {"rope_scaling": {"rope_type": "spiral"}},
            "rope scaling 'spiral' is not known; known are",
        ),
        ("LlamaForCausalLM", {"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0]}}, "1 factors for the 8"),
        (
            "LlamaForCausalLM",
            {"rope_scaling": {"rope_type": "longrope"}},
            "rope scaling 'longrope' lacks 'long_factor'",
        ),
        ("Qwen3ForCausalLM", {"hidden_act": "relu"}, "hidden_act 'relu' is not supported by qwen3"),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 0.45}, "7 dimensions of a head of 16"),
        ("Olmo3ForCausalLM", {"sliding_window": 9, "layer_types": ["chunked"] * 8}, "layer_types must name 8 layers"),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": [True]}, "sliding_window_pattern must name 8 layers"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}, "no_rope_layers must name 8 layers"),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 9, "use_sliding_window": 1, "max_window_layers": "x"},
            "max_window_layers",
        ),
        (
            "LlamaForCausalLM",
            {"tie_word_embeddings": "false"},
            "tie_word_embeddings must be true or false, got 'false'",
        ),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": "vision"}, "use_bidirectional_attention must be true or"),
        ("Qwen2ForCausalLM", {"sliding_window": 9, "use_sliding_window": "no"}, "use_sliding_window must be true or"),
        ("Qwen3ForCausalLM", {"is_causal": []}, r"is_causal must be true or false, got \[\]"),
        ("LlamaForCausalLM", {"head_dim": 16.0}, "head_dim must be a positive whole number, got 16.0"),
        ("LlamaForCausalLM", {"num_hidden_layers": "2"}, "num_hidden_layers must be a positive whole number, got '2'"),
        (
            "Glm4MoeForCausalLM",
            GLM_SHAPE | {"n_group": 3},
            r"3 \(topk_group\) of 3 groups \(n_group\) of 8 experts cannot",
        ),
        (
            "Glm4MoeForCausalLM",
            GLM_SHAPE | {"n_group": 8, "topk_group": 4},
            "n_group 8 leaves too few of 8 experts for 3",
        ),
        (
            "Glm4MoeForCausalLM",
            GLM_SHAPE | {"n_group": 4, "topk_group": 1},
            "n_group 4 leaves too few of 8 experts for 3",
        ),
        ("Glm4MoeForCausalLM", GLM_SHAPE | {"routed_scaling_factor": 0}, "routed_scaling_factor must be positive"),
        (
            "Glm4MoeForCausalLM",
            GLM_SHAPE | {"first_k_dense_replace": "1"},
            "first_k_dense_replace must be the number of",
        ),
        ("glm4moe", GLM_SHAPE | {"expert_gating_func": 1}, "expert_gating_func must be 2, got 1"),
        (
            "Mistral3ForConditionalGeneration",
            {"num_key_value_heads": 2, "text_config": {"model_type": "mistral4", "kv_lora_rank": 256}},
            r"ministral3 with latent attention \(kv_lora_rank\) is not supported",
        ),
        ("Ernie4_5ForCausalLM", {"use_bias": True}, "ernie4_5 with use_bias is not supported"),
        (
            "Ministral3ForCausalLM",
            {"num_key_value_heads": 2, "rope_parameters": {**PLAIN, "llama_4_scaling_beta": 0.1}},
            "original_max_position_em",
        ),
        ("GraniteForCausalLM", {"logits_scaling": 0}, "logits_scaling must be positive"),
        ("Gemma3ForCausalLM", {"rope_parameters": {"full_attention": 3}}, "rope_parameters of full_attention must be"),
        (
            "Qwen2ForCausalLM",
            {"rope_parameters": PLAIN, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_type of rope_scaling is 'yarn', which rope_parameters does not say; move what holds into rope_param",
        ),
        (
            "Qwen2ForCausalLM",
            {"rope_parameters": PLAIN, "rope_scaling": {"type": "default", "factor": 4.0}},
            "factor of rope_scaling is 4.0, which rope_parameters does not say",
        ),
        (
            "LlamaForCausalLM",
            {"rope_parameters": {**PLAIN, "alpha": 1000.0}},
            "alpha of rope_parameters is not support",
        ),
        (
            "LlamaForCausalLM",
            {"rope_scaling": {"type": "linear", "factor": 2, "llama_4_scaling_beta": 0.1}},
            "llama_4_",
        ),
        ("LlamaForCausalLM", {"rope_parameters": PLAIN, "rope_scaling": [1]}, r"rope_scaling must be an object, got"),
    ],
)
def test_what_cannot_be_is_refused_by_name(arch, more, problem):
    with pytest.raises(ModelError, match=problem):
        FAMILIES[arch].spec(SHAPE | more)
