"""Families whose layers keep states: what their configurations and files mean."""

from collections.abc import Iterator
from dataclasses import dataclass

import gguf
import numpy as np
import pytest
import torch

from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.checkpoints.families import FAMILIES
from kvloom.checkpoints.families.mixers import KimiDelta, LatentAttention
from kvloom.checkpoints.families.multiplied import multiplied
from kvloom.contract.errors import ModelError
from tests.support.lazily import lazily
from tests.support.models.checkpoints import save, tiny_model

from .test_families import QWEN_MOE, TOKENS, logits_of
from .test_gguf import write

transformers = lazily("transformers")


@pytest.mark.parametrize(("name", "arch"), [("qwen3.5", "qwen35"), ("qwen3 next", "qwen3next")])
def test_a_quantised_file_of_layers_with_a_state_is_computed_as_its_values_say(name, arch, tmp_path):
    experts = {"expert_shared_feed_forward_length": 96, "expert_feed_forward_length": 32}
    more = {f"{arch}__{key}": value for key, value in (QWEN_MOE | experts).items()} if name == "qwen3 next" else {}
    model = tiny_model(name, moe_intermediate_size=32, shared_expert_intermediate_size=96, linear_value_head_dim=32)
    path = write(tmp_path / "m.gguf", model, arch, "Q8_0", **more)
    for key, value in model.named_parameters():
        if value.ndim > 1 and not key.endswith(("conv1d.weight", "mlp.gate.weight", "shared_expert_gate.weight")):
            blocks = gguf.quants.quantize(value.detach().numpy(), gguf.GGMLQuantizationType.Q8_0)
            value.data = torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0))
    with torch.no_grad():
        wanted = model(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits_of(path), wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"linear_num_value_heads": 3}, "linear_num_value_heads 3 is no multiple of linear_num_key_heads 2"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be 2 to 8, got 1"),
        ({"linear_inner_size": 66}, "66 channels cannot be shared by 4 value heads"),
        ({"layer_types": None, "recurrent_layers": [True]}, "recurrent_layers must name 4 layers"),
        (
            {"layer_types": ["sliding_attention"] * 4},
            "layer_types must name 4 layers, each linear_attention or full_attention",
        ),
    ],
)
def test_sizes_of_a_delta_rule_that_cannot_be_are_named(fields, told):
    config = {**tiny_model("qwen3.5").config.to_dict(), **fields}
    with pytest.raises(ModelError, match=told):
        FAMILIES["Qwen3_5ForCausalLM"].spec(config)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"mamba_n_heads": 3}, r"128 channels in 3 heads \(mamba_n_heads\) in 2 groups"),
        ({"mamba_n_groups": 3}, r"128 channels in 4 heads \(mamba_n_heads\) in 3 groups"),
        ({"mamba_d_head": 16}, "mamba_d_head must be 32, got 16"),
        ({"mamba_d_conv": 9}, "mamba_d_conv must be 2 to 8, got 9"),
        ({"mamba_proj_bias": True}, "Mamba-2 with mamba_proj_bias is not supported"),
        ({"time_step_limit": [1.0, 0.5]}, r"time_step_limit must be two numbers in order, got \[1.0, 0.5\]"),
        ({"time_step_limit": 3}, "time_step_limit must be two numbers in order, got 3"),
        ({"layer_types": ["mamba", "conv"] * 2}, "layer_types must name 4 layers, each linear_attention or full_att"),
    ],
)
def test_sizes_of_mamba_2_that_cannot_be_are_named(fields, told):
    config = {**tiny_model("granite 4").config.to_dict(), **fields}
    with pytest.raises(ModelError, match=told):
        FAMILIES["GraniteMoeHybridForCausalLM"].spec(config)


def test_older_names_of_layers_and_endless_limits_of_steps_are_read_as_newer_ones():
    config = tiny_model("granite 4").config.to_dict()
    older = {"layer_types": ["mamba", "attention", "mamba", "mamba"], "mamba_d_head": "auto"}
    family = FAMILIES["GraniteMoeHybridForCausalLM"]
    for limits in (None, [0.0, {"__float__": "Infinity"}], [0, float("inf")]):
        assert family.spec({**config, **older, "time_step_limit": limits}) == family.spec(config)


def test_of_qwen3_5_that_sees_the_text_is_served(tmp_path):
    model = tiny_model("qwen3.5")
    text = {**model.config.to_dict(), "model_type": "qwen3_5_text"}
    sight = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=sight)
    torch.manual_seed(0)
    whole = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        wanted = whole(torch.tensor([TOKENS])).logits[0]
    checkpoint = open_checkpoint(save(whole, tmp_path))
    assert checkpoint.unread == ()
    torch.testing.assert_close(logits_of(checkpoint.path), wanted, atol=2e-4, rtol=1e-4)


BARE = {"hidden_size": 4096, "vocab_size": 99}
SIZES = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv", "mamba_conv_bias")
OTHERS = {  # where SIZES have other names
    "NemotronH": ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel", "use_conv_bias"),
    "Mamba2": ("num_heads", "head_dim", "state_size", "n_groups", "conv_kernel", "use_conv_bias"),
}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("FalconH1", {"num_hidden_layers": 2, "num_attention_heads": 32, "intermediate_size": 96}),
        ("NemotronH", {}),
        ("Mamba2", {"num_hidden_layers": 2}),
    ],
)
def test_a_folder_of_mambas_kin_that_says_only_its_sizes_is_what_transformers_makes_of_it(name, fields):
    theirs = getattr(transformers, f"{name}Config")(**BARE, **fields)
    spec = FAMILIES[f"{name}ForCausalLM"].spec(BARE | fields)
    kinds = theirs.layer_types
    has_state, attends = ("linear_attention", "hybrid"), ("full_attention", "hybrid")
    assert [index for index, _ in spec.recurrent] == [i for i, kind in enumerate(kinds) if kind in has_state]
    assert [index for index, _ in spec.attention] == [i for i, kind in enumerate(kinds) if kind in attends]
    assert [layer.has_mlp for layer in spec.layers] == [kind in ("mlp", "moe", "hybrid") for kind in kinds]
    assert [layer.has_experts for layer in spec.layers] == [kind == "moe" for kind in kinds]
    for _, own in spec.recurrent:
        sizes = (own.num_heads, own.head_dim, own.state_dim, own.num_groups, own.conv_width, own.has_conv_bias)
        assert sizes == tuple(getattr(theirs, key) for key in OTHERS.get(name, SIZES))
        assert own.has_norm == getattr(theirs, "mamba_rms_norm", True)
    for _, own in spec.attention:
        heads = (theirs.num_attention_heads, theirs.num_key_value_heads, getattr(theirs, "head_dim", 128))
        assert (own.num_heads, own.num_kv_heads, own.head_dim) == heads
        assert (own.rope is None) == (name == "NemotronH")
    assert spec.norm_eps == getattr(theirs, "rms_norm_eps", None) or theirs.layer_norm_epsilon
    assert spec.max_seq_len == getattr(theirs, "max_position_embeddings", 1 << 20)
    assert spec.intermediate == getattr(theirs, "intermediate_size", 0)
    if spec.experts is not None:
        own = spec.experts
        assert (own.count, own.per_token, own.intermediate) == (
            theirs.n_routed_experts,
            theirs.num_experts_per_tok,
            theirs.moe_intermediate_size,
        )
        assert own.shared == theirs.moe_shared_expert_intermediate_size
        assert (own.weighs_chosen, own.scores, own.has_correction) == (True, "sigmoid", True)


KIMI = {"num_hidden_layers": 8, "hidden_size": 64, "vocab_size": 99, "model_max_length": 512, "num_experts": 16}
KIMI |= {"num_experts_per_token": 3, "moe_renormalize": False, "num_expert_group": 4, "topk_group": 2}
PUBLISHED = {"head_dim": 32, "num_heads": 3, "short_conv_kernel_size": 5}
PUBLISHED |= {"full_attn_layers": [3, 8], "kda_layers": [1, 2, 4, 5, 6, 7]}


@pytest.mark.parametrize(
    "fields", [{}, {"linear_attn_config": PUBLISHED, "first_k_dense_replace": 2}], ids=["bare", "published"]
)
def test_a_published_configuration_of_kimi_linear_says_what_transformers_makes_of_it(fields):
    theirs, spec = (
        transformers.KimiLinearConfig(**KIMI, **fields),
        FAMILIES["KimiLinearForCausalLM"].spec(KIMI | fields),
    )
    for index, layer in enumerate(spec.layers):
        assert isinstance(layer.mixer, KimiDelta) == (theirs.layer_types[index] == "linear_attention")
        assert layer.has_experts == (theirs.mlp_layer_types[index] == "sparse")
    sizes = theirs.linear_num_heads, theirs.linear_head_dim, theirs.linear_conv_kernel_dim
    assert {mixer for _, mixer in spec.recurrent} == {KimiDelta(*sizes)}
    heads = theirs.num_attention_heads, theirs.kv_lora_rank, theirs.qk_nope_head_dim, theirs.qk_rope_head_dim
    assert {mixer for _, mixer in spec.attention} == {LatentAttention(*heads, theirs.v_head_dim)}
    own, scale = spec.experts, theirs.routed_scaling_factor
    assert (own.count, own.per_token, own.groups, own.kept_groups, own.weighs_chosen, own.scale) == (
        *(16, 3, 4, 2, False, scale),
    )
    assert (own.intermediate, own.shared) == (theirs.moe_intermediate_size,) * 2
    assert (spec.max_seq_len, spec.norm_eps, spec.intermediate) == (512, theirs.rms_norm_eps, theirs.intermediate_size)


@pytest.mark.parametrize(
    ("name", "fields", "told"),
    [
        ("KimiLinear", {"mla_use_nope": False}, "kimi_linear with mla_use_nope false is not supported"),
        ("KimiLinear", {"linear_attn_config": [1]}, r"linear_attn_config must be an object, got \[1\]"),
        (
            "KimiLinear",
            {"linear_attn_config": {"full_attn_layers": 5}},
            "full_attn_layers must be numbers of layers, 1 to",
        ),
        ("KimiLinear", {"linear_attn_config": {"full_attn_layers": [0]}}, "full_attn_layers must be numbers"),
        ("KimiLinear", {"linear_conv_kernel_dim": 9}, "linear_conv_kernel_dim must be 2 to 8, got 9"),
        ("NemotronH", {"mlp_hidden_act": "silu"}, "nemotron_h with mlp_hidden_act 'silu' is not supported"),
        ("NemotronH", {"moe_latent_size": 32}, "nemotron_h with moe_latent_size 32 is not supported"),
        ("NemotronH", {"use_bias": True}, "nemotron_h with use_bias is not supported"),
        ("NemotronH", {"layers_block_type": ["conv"]}, "layer_types must name 1 layers, each one of linear_attention,"),
        ("FalconH1", {"mamba_rms_norm": True}, "falcon_h1 with mamba_norm_before_gate is not supported"),
        ("FalconH1", {"projectors_bias": True}, "falcon_h1 with projectors_bias is not supported"),
        ("Mamba2", {"use_bias": True}, "mamba2 with use_bias is not supported"),
    ],
)
def test_what_layers_with_a_state_cannot_be_here_is_named(name, fields, told):
    config = {**BARE, "num_hidden_layers": 2, "num_attention_heads": 32, "intermediate_size": 96, **fields}
    with pytest.raises(ModelError, match=told):
        FAMILIES[f"{name}ForCausalLM"].spec(config)


def test_a_pattern_of_letters_names_the_layers_of_nemotron_h_too():
    family = FAMILIES["NemotronHForCausalLM"]
    kinds = ["linear_attention", "mlp", "full_attention", "moe"]
    assert family.spec(BARE | {"hybrid_override_pattern": "M-*E", "num_hidden_layers": 4}) == family.spec(
        BARE | {"layers_block_type": kinds}
    )
    with pytest.raises(ModelError, match=r"got \['linear_attention', 'X'"):
        family.spec(BARE | {"hybrid_override_pattern": "MX"})


def test_numbers_of_multipliers_that_cannot_be_are_named(tmp_path):
    folder = save(tiny_model("falcon h1", mlp_multipliers=[1.0, 2.0]), tmp_path)
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"mlp_multipliers": [', '"mlp_multipliers": [3.0,'))
    with pytest.raises(ModelError, match="mlp_multipliers must be 2 numbers, got"):
        open_checkpoint(folder)


def test_pieces_of_a_multiplied_matrix_are_those_of_the_whole():
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    whole = multiplied(InPieces(values), ((1, 2.0), (3, 0.5)))
    assert np.array_equal(whole.float32(), values * np.array([[2], [0.5], [0.5], [0.5]], np.float32))
    pieces = list(whole.float32_pieces())
    assert [at for at, _ in pieces] == [0, 2]
    assert np.array_equal(np.concatenate([part for _, part in pieces]), whole.float32())
    assert (whole.name, whole.shape, whole.form, list(whole.number_pieces())) == ("q", (4, 3), "", [])
    plain = InPieces(values)
    assert multiplied(plain, ((0, 1.0),)) is plain


@dataclass
class InPieces:
    """A matrix that is read two rows at a time."""

    values: np.ndarray
    name: str = "q"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def float32(self) -> np.ndarray:
        return self.values

    def float32_pieces(self) -> Iterator[tuple[int, np.ndarray]]:
        for at in range(0, len(self.values), 2):
            yield at, self.values[at : at + 2]
