"""What files leave unsaid: a GGUF file as llama.cpp reads it, a folder as transformers does."""

from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import transformers

from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.checkpoints.families import FAMILIES, family_of
from kvloom.checkpoints.families.mixers import KimiDelta, LatentAttention, Mamba2, ShortConv
from kvloom.checkpoints.gguf import config_of
from kvloom.checkpoints.metadata import Header, TensorInfo, config_keys
from kvloom.contract.errors import ModelError
from tests.engine.weights.test_gguf import write
from tests.support.models.checkpoints import tiny_model

SIZES = {
    "context_length": 512,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "block_count": 8,
    "attention.head_count": 4,
    "attention.key_length": 16,
}


def spec_of(arch: str, **more: Any) -> Any:
    """Of a GGUF file's metadata, without its tensors."""
    told = {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in (SIZES | more).items()}
    header = Header(told, {"token_embd.weight": TensorInfo("token_embd.weight", (100, 64), 0, 0)})
    return family_of(arch, "test").spec(config_of(header, "test")[1])


def windows(arch: str, **more: Any) -> list[int | None]:
    return [layer.mixer.window for layer in spec_of(arch, **more).layers]


@pytest.mark.parametrize("arch", ["phi3", "llama", "gemma2", "gemma3", "olmo2", "smollm3", "qwen2", "qwen3", "granite"])
def test_a_window_of_0_is_none(arch: str):
    assert windows(arch, **{"attention.sliding_window": 0}) == [None] * 8
    assert config_keys(arch, {f"{arch}.attention.sliding_window": 0})["sliding_window"] is None


def test_a_file_with_a_window_of_0_is_opened(tmp_path: Path):
    path = write(tmp_path / "m.gguf", tiny_model("phi3"), "phi3", phi3__attention__sliding_window=0)
    assert {layer.mixer.window for layer in open_checkpoint(path).spec.layers} == {None}


@pytest.mark.parametrize(
    ("arch", "wanted"),
    [
        ("llama", [None] * 8),
        ("phi3", [None] * 8),
        ("gemma2", [4096, None] * 4),
        ("gemma3", [None] * 8),
        ("olmo2", [None] * 8),
        ("gpt-oss", [128, None] * 4),
    ],
)
def test_a_file_without_a_window_has_that_of_its_architecture(arch: str, wanted: list[int | None]):
    experts = {"expert_count": 4, "expert_used_count": 2} if arch == "gpt-oss" else {}
    assert windows(arch, **experts) == wanted


def test_a_softcap_or_a_multiplier_of_0_is_none():
    gemma = spec_of("gemma2", attn_logit_softcapping=0.0, final_logit_softcapping=0.0)
    assert (gemma.attention_softcap, gemma.logit_softcap) == (0.0, 0.0)
    assert (spec_of("gemma2").attention_softcap, spec_of("gemma2").logit_softcap) == (50.0, 30.0)
    granite = spec_of("granite", embedding_scale=0.0, residual_scale=0.0, **{"attention.scale": 0.0})
    assert granite == spec_of("granite")
    assert granite.attention_scale == 16**-0.5


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_factor_without_a_type_is_a_linear_one(key: str):
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    assert spec_of("llama", **{key: 4.0}) == spec_of("llama", **linear) != spec_of("llama")
    assert spec_of("llama", **{key: 0.0}) == spec_of("llama", **{"rope.scaling.type": "linear"}) == spec_of("llama")


def test_granite_without_trained_positions_has_no_rope():
    layers = spec_of("granite", **{"rope.scaling.finetuned": False}).layers
    assert [layer.mixer.rope for layer in layers] == [None] * 8
    assert None not in [layer.mixer.rope for layer in spec_of("granite", **{"rope.scaling.finetuned": True}).layers]
    assert None not in [layer.mixer.rope for layer in spec_of("llama", **{"rope.scaling.finetuned": False}).layers]


BARE = {
    "hidden_size": 1024,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "vocab_size": 99,
}
BARE |= {"num_experts_per_tok": 2, "num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 32}
BARE |= {"shared_expert_intermediate_size": 32}
RECURRENT = ("linear_attention", "conv")
IN_OTHER_WORDS = ("FalconH1ForCausalLM", "NemotronHForCausalLM", "Mamba2ForCausalLM")  # see test_hybrids.py
IN_OTHER_WORDS += ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")  # see test_assistants.py
FOLDERS = [name for name in FAMILIES if name.endswith("ForCausalLM") and name not in IN_OTHER_WORDS]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_says_only_its_sizes_is_what_transformers_makes_of_it(name: str):
    of_text = name.startswith(("Gemma3", "Gemma4", "Qwen3_5"))
    kind = name.replace("ForCausalLM", "TextConfig" if of_text else "Config")
    bare = BARE | ({"n_group": 2, "topk_group": 1} if name == "DeepseekV3ForCausalLM" else {})  # of four experts
    theirs = getattr(transformers, kind)(**bare)
    spec = FAMILIES[name].spec(bare)
    window = getattr(theirs, "sliding_window", None) if getattr(theirs, "use_sliding_window", True) else None
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 8
    assert [mixer.window for _, mixer in spec.attention] == [
        window if kind == "sliding_attention" and window else None for kind in kinds if kind not in RECURRENT
    ]
    assert [index for index, _ in spec.recurrent] == [i for i, kind in enumerate(kinds) if kind in RECURRENT]
    for _, mixer in spec.recurrent:
        if isinstance(mixer, ShortConv):
            assert (mixer.size, mixer.conv_width) == (theirs.hidden_size, theirs.conv_L_cache)
            continue
        if isinstance(mixer, Mamba2):
            sizes = (theirs.mamba_n_heads, theirs.mamba_d_head, theirs.mamba_d_state, theirs.mamba_n_groups)
            assert (mixer.num_heads, mixer.head_dim, mixer.state_dim, mixer.num_groups) == sizes
            assert (mixer.conv_width, mixer.has_conv_bias) == (theirs.mamba_d_conv, theirs.mamba_conv_bias)
            assert (mixer.least_step, mixer.most_step) == theirs.time_step_limit
            continue
        if isinstance(mixer, KimiDelta):
            assert (mixer.num_heads, mixer.head_dim) == (theirs.linear_num_heads, theirs.linear_head_dim)
            assert mixer.conv_width == theirs.linear_conv_kernel_dim
            continue
        assert (mixer.num_k_heads, mixer.num_v_heads) == (theirs.linear_num_key_heads, theirs.linear_num_value_heads)
        assert (mixer.k_dim, mixer.v_dim) == (theirs.linear_key_head_dim, theirs.linear_value_head_dim)
        assert mixer.conv_width == theirs.linear_conv_kernel_dim
    ropes = getattr(theirs, "rope_parameters", None)
    if ropes is None:
        assert {mixer.rope for _, mixer in spec.attention} <= {None}
    elif name not in ("GptOssForCausalLM", "Ministral3ForCausalLM"):  # silent, they have YaRN there; no file is
        thetas = [ropes.get(kind, ropes)["rope_theta"] for kind in kinds]
        for index, mixer in spec.attention:
            assert mixer.rope is None or mixer.rope.inv_freq[1] == pytest.approx(thetas[index] ** (-2 / mixer.rope.dim))
    of_layers = theirs.per_layer_config if name.startswith("Gemma4") else [theirs] * 8
    for index, mixer in spec.attention:
        own = of_layers[index]
        if isinstance(mixer, LatentAttention):
            sizes = mixer.kv_rank, mixer.rope_dim, mixer.nope_dim, mixer.out_dim, mixer.q_rank
            keys = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "q_lora_rank")
            assert sizes == tuple(getattr(own, key) for key in keys)
            continue
        head_dim = getattr(own, "head_dim", None) or 1024 // 32
        assert (mixer.num_kv_heads, mixer.head_dim) == (own.num_key_value_heads, head_dim)
    assert spec.norm_eps == (theirs.norm_eps if name.startswith("Lfm2") else theirs.rms_norm_eps)
    assert spec.max_seq_len == theirs.max_position_embeddings
    assert spec.tie_embeddings == theirs.tie_word_embeddings
    inputs = (getattr(theirs, key, 0) for key in ("hidden_size_per_layer_input", "vocab_size_per_layer_input"))
    assert ((0, 0) if spec.layer_inputs is None else astuple(spec.layer_inputs)) == tuple(inputs)


@pytest.mark.parametrize("fields", [{"conv_bias": True}, {"use_expert_bias": False}])
def test_kinds_of_lfm2_that_nobody_has_published_are_refused(fields):
    with pytest.raises(ModelError, match="lfm2 with conv_bias, or without use_expert_bias, is not supported"):
        FAMILIES["Lfm2ForCausalLM"].spec({**BARE, **fields})


def test_which_layers_of_lfm2_have_attention_is_said_by_number_too():
    assert [index for index, _ in FAMILIES["Lfm2ForCausalLM"].spec({**BARE, "full_attn_idxs": [1, 5]}).attention] == [
        1,
        5,
    ]
