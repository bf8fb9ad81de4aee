"""Families whose layers keep states: what their configurations and files mean."""

import gguf
import pytest
import torch

from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.checkpoints.families import FAMILIES
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
