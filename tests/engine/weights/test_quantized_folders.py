"""Folders of AWQ, GPTQ, compressed-tensors and FP8: the CPU kernels keep their values; and what is refused."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.checkpoints.quantized.packed import PackedMatrix, check_sizes
from kvloom.checkpoints.quantized.scheme import scheme_of
from kvloom.contract.errors import ModelError
from kvloom.rank.kernels.cpu import CpuBackend, CpuOptions
from kvloom.rank.kernels.reference import ReferenceBackend
from tests.support.models.checkpoints import run_step, tiny_model
from tests.support.models.quantized import (
    Format,
    awq,
    compressed,
    fp8,
    gptq,
    group_config,
    mxfp4,
    per_token,
    write_folder,
)

from .test_blocks import values_of

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
SHUFFLED = [3, 1, 0, 2] * 64  # the group of each column
FORMATS = {
    "awq": Format({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}, awq(32), "int4"),
    "awq of 128": Format({"quant_method": "awq", "bits": 4, "version": "gemm"}, awq(128), "int4"),
    "gptq": Format(GPTQ, gptq(4, 32), "int4"),
    "gptq v2": Format({**GPTQ, "checkpoint_format": "gptq_v2"}, gptq(4, 32, missing=0), "int4"),
    "gptq of whole rows": Format({**GPTQ, "group_size": -1}, gptq(4, None), "int4"),
    "gptq of 8 bits": Format({**GPTQ, "bits": 8, "group_size": 64}, gptq(8, 64), "int8_min"),
    "gptq, act order": Format({**GPTQ, "desc_act": True}, gptq(4, 32, SHUFFLED)),
    "compressed": Format(
        group_config("pack-quantized", num_bits=4, strategy="group", group_size=32), compressed(4, 32), "int4"
    ),
    "compressed, zeros": Format(
        group_config("pack-quantized", num_bits=4, strategy="group", group_size=64, symmetric=False),
        compressed(4, 64, is_symmetric=False),
        "int4",
    ),
    "compressed to 8 bits": Format(
        group_config("pack-quantized", num_bits=8, strategy="channel"), compressed(8, None), "int8"
    ),
    "compressed, bytes": Format(
        group_config("int-quantized", num_bits=8, strategy="channel"), compressed(8, None, is_packed=False), "int8"
    ),
    "compressed, a scale a token": Format(
        per_token(group_config("int-quantized", num_bits=8, strategy="channel")),
        compressed(8, None, is_packed=False),
        "int8_channel",
    ),
    "compressed, a scale a token, packed": Format(
        per_token(group_config("pack-quantized", num_bits=8, strategy="channel")), compressed(8, None), "int8_channel"
    ),
    "compressed, bytes and zeros": Format(
        group_config("int-quantized", num_bits=8, strategy="channel", symmetric=False),
        compressed(8, None, is_symmetric=False, is_packed=False),
        "int8_min",
    ),
    "compressed, fp8 by channel": Format(
        group_config("float-quantized", num_bits=8, type="float", strategy="channel"), fp8(lambda rows, cols: (rows, 1))
    ),
    "compressed, fp8 by tensor": Format(
        group_config("float-quantized", num_bits=8, type="float", strategy="tensor"), fp8(lambda rows, cols: (1,))
    ),
    "compressed, mxfp4": Format(
        group_config("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32), mxfp4, "fp4"
    ),
    "fp8 by block": Format(
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [48, 48]},
        fp8(lambda rows, cols: (-(-rows // 48), -(-cols // 48)), "weight_scale_inv", 48),
    ),
    "awq, one layer left": Format(
        {"quant_method": "awq", "group_size": 32, "modules_to_not_convert": ["model.layers.0"]},
        awq(32),
        "int4",
        ("lm_head", "embed_tokens", *(f"layers.0.{part}_proj" for part in ("mlp.up", "self_attn.q"))),
    ),
}
TOKENS = [5, 9, 1, 77, 30, 2, 2, 101]


def wide_model() -> Any:
    return tiny_model("qwen2", hidden_size=128, intermediate_size=256)


@pytest.fixture(scope="module", params=FORMATS)
def written(request, tmp_path_factory) -> tuple[Format, Any, Path]:
    """A format, a model with the weights that its folder stands for, and that folder."""
    model = wide_model()
    return FORMATS[request.param], model, write_folder(model, tmp_path_factory.mktemp("model"), FORMATS[request.param])


def test_a_folder_gives_the_logits_of_its_dequantised_model(written):
    _, model, folder = written
    checkpoint = open_checkpoint(folder)
    with torch.no_grad():
        wanted = model(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(
        run_step(ReferenceBackend(checkpoint.spec, checkpoint.weights, 4), [TOKENS], [[2]]),
        wanted,
        atol=2e-4,
        rtol=1e-4,
    )
    backend = CpuBackend(checkpoint.spec, checkpoint.weights, 4, CpuOptions("stored"))
    found = run_step(backend, [TOKENS], [[2]])
    assert float((found - wanted).norm() / wanted.norm()) < 0.05


def test_its_matrices_keep_their_values(written):
    of, model, folder = written
    weights = open_checkpoint(folder).weights
    for name, key in (("layers.1.down", "layers.1.mlp.down_proj"), ("layers.0.k", "layers.0.self_attn.k_proj")):
        wanted = model.state_dict()[f"model.{key}.weight"].numpy()
        raw = weights.tensor(name)
        assert np.allclose(raw.float32(), wanted, rtol=1e-6, atol=0)
        assert weights.form(name) == raw.form == of.form
        if raw.form:
            found = np.concatenate([values_of(raw.form, numbers) for _, numbers in raw.number_pieces()])
            assert np.allclose(found, wanted, rtol=1e-4, atol=1e-6)


REFUSED = {
    "weights quantised by 'bitsandbytes' are not supported": {"quant_method": "bitsandbytes"},
    "weights quantised by 'an unnamed method' are not supported": {"bits": 4},
    "must be an object": "awq",
    "bits 3 is not supported; known: 4": {"quant_method": "awq", "bits": 3},
    "bits True is not supported": {"quant_method": "awq", "bits": True},
    "version 'gemv' is not supported": {"quant_method": "awq", "version": "gemv"},
    "zero_point False is not supported": {"quant_method": "awq", "zero_point": False},
    "group_size must be -1 or a multiple of 32, got 48": {"quant_method": "awq", "group_size": 48},
    "group_size must be -1 or a multiple of 32, got 0": {"quant_method": "gptq", "group_size": 0},
    "group_size must be -1 or a multiple of 32, got 'x'": {"quant_method": "gptq", "group_size": "x"},
    "bits 2 is not supported; known: 4, 8": {"quant_method": "gptq", "bits": 2},
    "dynamic: '+:.*down_proj' has settings of its own, which is not supported": {
        "quant_method": "gptq", "dynamic": {"-:lm_head": {}, "+:.*down_proj": {"bits": 8}},
    },
    "dynamic must be an object, got [1]": {"quant_method": "gptq", "dynamic": [1]},
    "checkpoint_format 'marlin' is not supported": {"quant_method": "gptq", "checkpoint_format": "marlin"},
    "format 'nvfp4-pack-quantized' is not supported": {
        "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
    },
    "format None is not supported": {"quant_method": "compressed-tensors"},
    "config_groups of 2 groups is not supported; one is": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": {}, "b": {}},
    },
    "config_groups must be an object": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": [1],
    },
    "num_bits 2 is not supported": group_config("pack-quantized", num_bits=2),
    "strategy 'token' is not supported": group_config("int-quantized", num_bits=8, strategy="token"),
    "strategy 'block' is not supported": group_config("float-quantized", num_bits=8, type="float", strategy="block"),
    "symmetric 'yes' is not supported": group_config("int-quantized", num_bits=8, symmetric="yes"),
    "group_size 16 is not supported": group_config("mxfp4-pack-quantized", group_size=16),
    "sparsity_config: format 'sparse-24-bitmask' is not supported": {
        **group_config("pack-quantized", num_bits=4), "sparsity_config": {"format": "sparse-24-bitmask"},
    },
    "input_activations must be an object, got 'int8'": {
        "quant_method": "compressed-tensors", "format": "int-quantized",
        "config_groups": {"a": {"weights": {"num_bits": 8}, "input_activations": "int8"}},
    },
    "fmt 'e5m2' is not supported": {"quant_method": "fp8", "fmt": "e5m2"},
    "weight_block_size must be two sizes, got [0, 128]": {"quant_method": "fp8", "weight_block_size": [0, 128]},
}  # fmt: skip


@pytest.mark.parametrize("rules", [None, {}, {"-:lm_head": {}}, {"+:.*down_proj": {}}])
def test_rules_that_change_nothing_but_leave_matrices_out_are_read(rules):
    assert scheme_of({"quantization_config": {**GPTQ, "dynamic": rules}}, "config.json") == scheme_of(
        {"quantization_config": GPTQ}, "config.json"
    )


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_not_known_is_refused_by_the_name_of_its_field(message):
    with pytest.raises(ModelError, match=rf"^config\.json: .*{re.escape(message)}"):
        scheme_of({"quantization_config": REFUSED[message]}, "config.json")


def damaged(folder: Path, change: Any) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


UP = "model.layers.1.mlp.up_proj"
DAMAGE = {
    f"tensor {UP}.scales is missing": lambda t: t.pop(f"{UP}.scales"),
    f"tensor {UP}.scales has shape [3, 256], the configuration asks for [4, 256]": lambda t: t.update(
        {f"{UP}.scales": t[f"{UP}.scales"][:3].clone()}
    ),
    f"tensor {UP}.qzeros is F32; known are I32": lambda t: t.update({f"{UP}.qzeros": t[f"{UP}.qzeros"].float()}),
    "tensor layers.1.up: a scale is no number below 65504": lambda t: t[f"{UP}.scales"].fill_(torch.nan),
    "tensor layers.1.up: g_idx names a group that there is not": lambda t: t[f"{UP}.g_idx"].fill_(7),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_a_matrix_that_cannot_be_is_refused_by_name(message, tmp_path):
    folder = damaged(write_folder(wide_model(), tmp_path / "model", FORMATS["gptq"]), DAMAGE[message])
    with pytest.raises(ModelError, match=re.escape(message)):
        list(open_checkpoint(folder).weights.tensor("layers.1.up").number_pieces())


def test_words_that_are_not_filled_are_refused():
    scheme = scheme_of({"quantization_config": {"quant_method": "awq", "group_size": 32}}, "config.json")
    with pytest.raises(ModelError, match=r"up of shape \[100, 64\] does not fill words of 8 numbers"):
        check_sizes(scheme, "up", (100, 64))


W8A8 = group_config("int-quantized", num_bits=8, strategy="channel")
NOT_PER_TOKEN = {
    "activations as they are": W8A8,
    "scales of the file": per_token(W8A8, dynamic=False),
    "scales of the file, unsaid": per_token(W8A8, dynamic=None),
    "one scale for all tokens": per_token(W8A8, strategy="tensor"),
    "with zero points": per_token(W8A8, symmetric=False),
    "in 4 bits": per_token(W8A8, num_bits=4),
    "floats": per_token(W8A8, type="float"),
    "weights in groups": per_token(group_config("int-quantized", num_bits=8, strategy="group", group_size=64)),
    "weights with zero points": per_token(group_config("int-quantized", num_bits=8, symmetric=False)),
    "weights in 4 bits": per_token(group_config("pack-quantized", num_bits=4, strategy="channel")),
    "8 bits of floats": per_token(group_config("float-quantized", num_bits=8, type="float", strategy="channel")),
}


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
@pytest.mark.parametrize("unsaid", [{}, {"num_bits": None, "type": None, "symmetric": None}])
def test_activations_have_a_scale_a_token_where_the_folder_says_so(strategy, unsaid):
    config = per_token(group_config("int-quantized", num_bits=8, strategy=strategy), **unsaid)
    assert scheme_of({"quantization_config": config}, "config.json").per_token


@pytest.mark.parametrize("what", NOT_PER_TOKEN)
def test_and_groups_of_their_own_where_it_says_otherwise(what):
    assert not scheme_of({"quantization_config": NOT_PER_TOKEN[what]}, "config.json").per_token


def test_a_matrix_too_wide_for_whole_sums_has_groups():
    scheme = scheme_of({"quantization_config": per_token(W8A8)}, "config.json")
    assert PackedMatrix("m", (1, 1 << 17), scheme, {}).form == "int8_channel"
    assert PackedMatrix("m", (1, (1 << 17) + 1), scheme, {}).form == "int8"


def test_mxfp4_is_of_experts_alone():
    assert scheme_of({"quantization_config": {"quant_method": "mxfp4"}}, "config.json").layout == "mxfp4_experts"


def test_a_folder_that_is_not_quantised_has_no_scheme():
    assert scheme_of({"architectures": ["LlamaForCausalLM"]}, "config.json") is None


def test_floats_that_are_no_numbers_are_refused(tmp_path):
    folder = write_folder(wide_model(), tmp_path / "model", FORMATS["compressed, fp8 by tensor"])
    damaged(folder, lambda t: t[f"{UP}.weight"].view(torch.uint8).fill_(0x7F))
    with pytest.raises(ModelError, match=r"tensor layers\.1\.up: a weight or its scale is no finite number"):
        open_checkpoint(folder).weights.tensor("layers.1.up").float32()


def test_groups_that_do_not_divide_the_columns_are_refused(tmp_path):
    folder = write_folder(wide_model(), tmp_path / "model", FORMATS["awq"])
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["group_size"] = 96
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"q_proj has 128 columns, no multiple of group_size 96"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["awq", "gptq, act order", "compressed, zeros", "fp8 by block"])
@pytest.mark.parametrize("family", ["phi3", "gemma3"])
def test_a_family_that_adapts_its_tensors_adapts_packed_ones(family, name, tmp_path):
    """Phi-3 stores q, k and v as one matrix, and gate and up as another; Gemma stores norm weights minus one."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = tiny_model(family, **sizes)
    checkpoint = open_checkpoint(write_folder(model, tmp_path / "model", FORMATS[name]))
    with torch.no_grad():
        wanted = model(torch.tensor([TOKENS])).logits[0]
    for backend, limit in (
        (ReferenceBackend(checkpoint.spec, checkpoint.weights, 4), 1e-4),
        (CpuBackend(checkpoint.spec, checkpoint.weights, 4, CpuOptions("stored")), 0.05),
    ):
        assert float((run_step(backend, [TOKENS], [[2]]) - wanted).norm() / wanted.norm()) < limit
