"""Folders of AWQ, GPTQ, compressed-tensors and FP8: the CPU kernels keep their values; and what is refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.checkpoints.quantized.packed import check_sizes
from kvloom.checkpoints.quantized.scheme import scheme_of
from kvloom.contract.errors import ModelError
from kvloom.rank.kernels.cpu import CpuBackend, CpuOptions
from kvloom.rank.kernels.reference import ReferenceBackend
from tests.support.models.checkpoints import run_step, tiny_model
from tests.support.models.folder_checks import TOKENS, check_logits, check_matrix, wide_model
from tests.support.models.quantized import (
    Format,
    awq,
    compressed,
    exponents,
    fp8,
    fp8_static,
    gptq,
    group_config,
    mxfp4,
    nvfp4,
    per_token,
    rotated,
    write_folder,
)

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
SHUFFLED = [3, 1, 0, 2] * 64  # the group of each column


def blocks_of_48(rows: int, cols: int) -> tuple[int, int]:
    return -(-rows // 48), -(-cols // 48)


def group_of(form: str, **weights: Any) -> dict[str, Any]:
    """A group that names its format."""
    (group,) = group_config(form, **weights)["config_groups"].values()
    return {**group, "format": form}


def mixed(**weights: Any) -> dict[str, Any]:
    """Two groups of the same weights, whose formats are theirs."""
    groups = {name: group_of("pack-quantized", **weights) for name in ("a", "b")} | {"c": {"targets": ["x"]}}
    return {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}


def rotating(linears: dict[str, Any], size: int | None = None, **weights: Any) -> dict[str, Any]:
    """Packed weights, rotated, as SpinQuant's R4: of the weights in the file, of inputs when the model runs."""
    uses = [{**linears, "location": "weight_input", "inverse": True}, {**linears, "location": "input"}]
    transforms = {"config_groups": {"R4": {"type": "hadamard", "apply": uses, "head_dim": size}}}
    return {**group_config("pack-quantized", **weights), "transform_config": transforms}


AUTO_ROUND = {
    "bits": 4, "group_size": 32, "sym": True, "iters": 20, "seqlen": 128, "lr": 0.005, "autoround_version": "0.16.1",
    "provider": "auto-round", "block_name_to_quantize": "model.layers",
}  # fmt: skip
BLOCK_FP8 = {
    "num_bits": 8, "type": "float", "symmetric": True, "group_size": None, "strategy": "block",
    "block_structure": [48, 48], "dynamic": False,
}  # fmt: skip
FORMATS = {
    "awq": Format({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}, awq(32), "int4"),
    "awq of 128": Format({"quant_method": "awq", "bits": 4, "version": "gemm"}, awq(128), "int4"),
    "awq, symmetric": Format(
        {**AUTO_ROUND, "quant_method": "awq", "zero_point": False, "version": "gemm"},
        awq(32, is_symmetric=True),
        "int4",
    ),
    "auto-round as gptq": Format(
        {**AUTO_ROUND, "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}, gptq(4, 32), "int4"
    ),
    "auto-round as awq": Format(
        {
            **AUTO_ROUND,
            "quant_method": "auto-round",
            "packing_format": "auto_round:auto_awq",
            "extra_config": {
                "lm_head": {"bits": 16, "data_type": "fp"},
            },
        },
        awq(32),
        "int4",
    ),
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
    "compressed, fp8 by block": Format(group_config("float-quantized", **BLOCK_FP8), fp8(blocks_of_48, block=48)),
    "compressed, mxfp8": Format(
        group_config(
            "mxfp8-quantized", num_bits=8, type="float", strategy="group", group_size=32, scale_dtype="torch.uint8"
        ),
        exponents(torch.uint8, 1, 32),
    ),
    "compressed, mixed of one kind": Format(
        mixed(num_bits=4, strategy="group", group_size=32, actorder="weight"), compressed(4, 32), "int4"
    ),
    "compressed, inputs rotated": Format(
        rotating({"targets": ["Linear"], "ignore": ["lm_head"]}, num_bits=4, strategy="group", group_size=32),
        rotated(compressed(4, 32)),
    ),
    "compressed, inputs rotated by parts": Format(
        rotating({"targets": "re:.*o_proj$"}, 32, num_bits=8, strategy="channel"),
        rotated(compressed(8, None), "o_proj", 32),
        "int8",
    ),
    "compressed, mxfp4": Format(
        group_config("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32), mxfp4, "fp4"
    ),
    "compressed, nvfp4": Format(
        group_config("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        nvfp4,
        "fp4_16",
    ),
    "compressed, four bits in a byte": Format(
        group_config("int-quantized", num_bits=4, strategy="group", group_size=32),
        compressed(4, 32, is_packed=False),
        "int8",
    ),
    "fp8 by block": Format(
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [48, 48]},
        fp8(blocks_of_48, "weight_scale_inv", 48),
    ),
    "fp8 by tensor": Format(
        {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "weight_block_size": None,
            "dequantize": False,
            "modules_to_not_convert": None,
            "modules_to_convert": None,
            "scale_fmt": "float",
            "expert_dtype": "fp8",
        },
        fp8_static,
    ),
    "fp8 of fbgemm": Format(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": None},
        fp8(lambda rows, cols: (rows, 1)),
    ),
    "fp8 by block of powers": Format(
        {"quant_method": "fp8", "weight_block_size": [48, 48], "scale_fmt": "ue8m0"},
        exponents(torch.float8_e8m0fnu, 48, 48, "weight_scale_inv"),
    ),
    "awq, one layer left": Format(
        {"quant_method": "awq", "group_size": 32, "modules_to_not_convert": ["model.layers.0"]},
        awq(32),
        "int4",
        ("lm_head", "embed_tokens", *(f"layers.0.{part}_proj" for part in ("mlp.up", "self_attn.q"))),
    ),
}


@pytest.fixture(scope="module", params=FORMATS)
def written(request, tmp_path_factory) -> tuple[Format, Any, Path]:
    """A format, a model with the weights that its folder stands for, and that folder."""
    model = wide_model()
    return FORMATS[request.param], model, write_folder(model, tmp_path_factory.mktemp("model"), FORMATS[request.param])


def test_a_folder_gives_the_logits_of_its_dequantised_model(written):
    _, model, folder = written
    check_logits(model, folder)


def test_its_matrices_keep_their_values(written):
    of, model, folder = written
    for name, key in (("layers.1.down", "layers.1.mlp.down_proj"), ("layers.0.k", "layers.0.self_attn.k_proj")):
        form = check_matrix(model, folder, name, key)
        assert form == of.form


def of_two_kinds(
    base: str, shape: tuple[int, int], dice: torch.Generator
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    write = fp8(lambda rows, cols: (rows, 1)) if ".mlp." in base else compressed(4, 32)
    return write(base, shape, dice)


def test_a_folder_of_two_kinds_of_matrices(tmp_path):
    """As llm-compressor writes two of its schemes in one recipe."""
    groups = {
        "mlp": {**group_of("float-quantized", num_bits=8, type="float", strategy="channel"), "targets": ["re:.*mlp.*"]},
        "others": group_of("pack-quantized", num_bits=4, strategy="group", group_size=32),
    }
    config = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    model = wide_model()
    checkpoint = open_checkpoint(write_folder(model, tmp_path, Format(config, of_two_kinds)))
    assert checkpoint.unread == ()
    assert [checkpoint.weights.form(f"layers.0.{part}") for part in ("q", "o", "up", "down")] == [
        "int4",
        "int4",
        "",
        "",
    ]
    with torch.no_grad():
        wanted = model(torch.tensor([TOKENS])).logits[0]
    found = run_step(ReferenceBackend(checkpoint.spec, checkpoint.weights, 4), [TOKENS], [[2]])
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)


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


def test_floats_that_are_no_numbers_are_refused(tmp_path):
    folder = write_folder(wide_model(), tmp_path / "model", FORMATS["compressed, fp8 by tensor"])
    damaged(folder, lambda t: t[f"{UP}.weight"].view(torch.uint8).fill_(0x7F))
    with pytest.raises(ModelError, match=r"tensor layers\.1\.up: a weight or its scale is no finite number"):
        open_checkpoint(folder).weights.tensor("layers.1.up").float32()


@pytest.mark.parametrize(
    ("uses", "problem"),
    [
        ([["Linear"]], r"tensor lm_head\.weight is rotated and not quantised"),
        ([["re:.*q_proj$"]] * 2, r"layers\.0\.self_attn\.q_proj is rotated twice"),
    ],
)
def test_rotations_that_cannot_be_followed_are_refused(uses, problem, tmp_path):
    folder = write_folder(wide_model(), tmp_path / "model", FORMATS["compressed"])
    config = json.loads((folder / "config.json").read_text())
    groups = {
        f"R{i}": rotating({"targets": one})["transform_config"]["config_groups"]["R4"] for i, one in enumerate(uses)
    }
    config["quantization_config"]["transform_config"] = {"config_groups": groups}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=problem):
        open_checkpoint(folder)


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
