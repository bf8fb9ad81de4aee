"""Folders in the layouts of GPTQModel, AutoAWQ, torchao and bitsandbytes: their values, and what is refused."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.checkpoints.quantized.codebook import Codebook
from kvloom.checkpoints.quantized.scheme import scheme_of
from kvloom.contract.errors import ModelError
from tests.support.models.folder_checks import check_logits, check_matrix, wide_model
from tests.support.models.quantized import Format, awq, gptq, write_folder
from tests.support.models.quantized_tools import (
    bitsandbytes_blocks,
    bitsandbytes_rows,
    by_name,
    gemv,
    gptq_stream,
    inverse_fp8,
    torchao_fp8,
    torchao_ints,
    torchao_pairs,
)

GPTQ = {
    "quant_method": "gptq", "method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False,
    "lm_head": False, "format": "gptq", "checkpoint_format": "gptq", "pack_dtype": "int32", "meta": {"mse": 0.0},
}  # fmt: skip
RULES = {"-:.*layers\\.0\\.mlp.*": {}, "+:.*down_proj": {"bits": 8, "group_size": 64}, r".*\.k_proj": {"bits": 2}}
BNB = {
    "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "_load_in_4bit": True,
    "_load_in_8bit": False, "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False, "llm_int8_threshold": 6.0,
    "llm_int8_skip_modules": None, "llm_int8_enable_fp32_cpu_offload": False, "llm_int8_has_fp16_weight": False,
}  # fmt: skip
BNB_8 = {**BNB, "load_in_4bit": False, "load_in_8bit": True, "_load_in_4bit": False, "_load_in_8bit": True}
PER_GROUP = {"_type": "PerGroup", "_version": 1, "_data": {"group_size": 32}}
PER_ROW = {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}


def typed(name: str, **data: Any) -> dict[str, Any]:
    return {"_type": name, "_version": 2, "_data": data}


def torchao(kind: dict[str, Any]) -> dict[str, Any]:
    """As transformers writes it."""
    rest = {"include_input_output_embeddings": False, "modules_to_not_convert": None, "untie_embedding_weights": False}
    return {"quant_method": "torchao", "quant_type": {"default": kind}, **rest}


def enum(kind: str, value: str) -> dict[str, Any]:
    return {"_type": kind, "_data": value}


FP8 = {
    "quant_method": "fp8", "method": "fp8", "bits": 8, "group_size": -1, "desc_act": False, "lm_head": False,
    "format": "float8_e4m3fn", "checkpoint_format": "float8_e4m3fn", "pack_dtype": "int32",
    "weight_scale_method": "row", "weight_scale_semantics": "inverse",
}  # fmt: skip
INT8 = typed("Int8WeightOnlyConfig", granularity=PER_ROW, group_size=None, set_inductor_config=True)
INTX = typed(
    "IntxWeightOnlyConfig",
    granularity=PER_GROUP,
    intx_packing_format=enum("IntxPackingFormat", "UNPACKED_TO_INT8"),
    mapping_type=enum("MappingType", "SYMMETRIC"),
    scale_dtype=None,
    weight_dtype=enum("torch.dtype", "int4"),
)
INT8_DYNAMIC = typed(
    "Int8DynamicActivationInt8WeightConfig", act_mapping_type=enum("MappingType", "SYMMETRIC"), granularity=PER_ROW
)
INT4 = typed("Int4WeightOnlyConfig", group_size=32, int4_packing_format=enum("Int4PackingFormat", "PLAIN"))
FLOAT8 = typed("Float8WeightOnlyConfig", granularity=PER_ROW, weight_dtype=enum("torch.dtype", "float8_e4m3fn"))
NAMED = {"model.layers.1.mlp.down_proj": INT4, r"re:.*\.k_proj": INT8, "_default": INTX, "re:.*never": None}
FORMATS = {
    "gptq of 2 bits": Format({**GPTQ, "bits": 2}, gptq(2, 32), "int4"),
    "gptq of 3 bits": Format({**GPTQ, "bits": 3, "group_size": 64}, gptq_stream(3, 64), "int4"),
    "gptq with rules": Format(
        {**GPTQ, "dynamic": RULES},
        by_name([("down_proj", gptq(8, 64)), ("k_proj", gptq(2, 32))], gptq(4, 32)),
        "",
        ("lm_head", "embed_tokens", "layers.0.mlp.gate_proj", "layers.0.mlp.up_proj", "layers.0.mlp.down_proj"),
    ),
    "gptq with a head": Format({**GPTQ, "lm_head": True}, gptq(4, 32), "int4", ("embed_tokens",)),
    "awq of GPTQModel": Format(
        {
            **GPTQ,
            "quant_method": "awq",
            "method": "awq",
            "format": "gemm",
            "checkpoint_format": "gemm",
            "version": "gemm",
            "dynamic": {"-:.*never": {}},
        },
        awq(32),
        "int4",
    ),
    "fp8 of GPTQModel": Format(FP8, inverse_fp8),
    "awq gemv of 128": Format({"quant_method": "awq", "version": "gemv", "zero_point": True}, gemv(128, 1), "int4"),
    "awq gemv of 64": Format({"quant_method": "awq", "version": "gemv", "group_size": 64}, gemv(64, 2), "int4"),
    "awq gemv of 32": Format({"quant_method": "awq", "format": "GEMV", "group_size": 32}, gemv(32, 4), "int4"),
    "torchao int8": Format(torchao(INT8), torchao_ints(8, None), "int8"),
    "torchao int8, no zeros": Format(torchao(INT8), torchao_ints(8, None, has_zeros=False), "int8"),
    "torchao int8, zeros": Format(torchao(INT8_DYNAMIC), torchao_ints(8, None, is_symmetric=False), "int8_min"),
    "torchao int8, dynamic": Format(torchao(INT8_DYNAMIC), torchao_ints(8, None), "int8_channel"),
    "torchao intx": Format(torchao(INTX), torchao_ints(4, 32), "int4"),
    "torchao intx, zeros": Format(torchao(INTX), torchao_ints(4, 32, is_symmetric=False), "int4"),
    "torchao int4": Format(torchao(INT4), torchao_pairs(32), "int4"),
    "torchao float8": Format(torchao(FLOAT8), torchao_fp8),
    "torchao by name": Format(
        torchao(typed("FqnToConfig", fqn_to_config=NAMED, module_fqn_to_config=NAMED, version=1)),
        by_name(
            [("layers.1.mlp.down_proj", torchao_pairs(32)), (".k_proj", torchao_ints(8, None))], torchao_ints(4, 32)
        ),
    ),
    "bitsandbytes int8": Format(BNB_8, bitsandbytes_rows, "int8"),
    "bitsandbytes nf4": Format(BNB, bitsandbytes_blocks()),
    "bitsandbytes fp4, nested": Format(
        {**BNB, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True}, bitsandbytes_blocks("fp4", nested=256)
    ),
    "bitsandbytes in bfloat16": Format(
        {**BNB, "bnb_4bit_quant_storage": "bfloat16"}, bitsandbytes_blocks(storage=torch.bfloat16)
    ),
    "bitsandbytes, blocks across rows": Format(BNB, bitsandbytes_blocks(block=4096, nested=3)),
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
    for name, key in (("layers.1.up", "layers.1.mlp.up_proj"), ("layers.0.v", "layers.0.self_attn.v_proj")):
        form = check_matrix(model, folder, name, key)
        assert form == of.form or not of.form


@pytest.mark.parametrize(
    ("of", "forms"),
    [
        ("gptq with rules", ["int4", "int4", "int8_min", "", ""]),
        ("torchao by name", ["int4", "int8", "int4", "int4", "int4"]),
    ],
)
def test_rules_give_matrices_forms_of_their_own(of, forms, tmp_path):
    weights = open_checkpoint(write_folder(wide_model(), tmp_path, FORMATS[of])).weights
    names = ("layers.0.q", "layers.0.k", "layers.1.down", "layers.0.up", "layers.0.down")
    assert [weights.form(name) for name in names] == forms


def test_the_first_rule_that_matches_holds():
    rules = {"-:.*q_proj": {}, "+:.*k_proj": {"bits": 2}, ".*_proj": {"bits": 8, "group_size": 64}, ".*": {}}
    scheme = scheme_of({"quantization_config": {**GPTQ, "dynamic": rules}}, "config.json")
    assert scheme is not None
    found = [scheme.of(f"model.layers.0.{name}") for name in ("k_proj", "v_proj", "other")]
    assert [(one.bits, one.group) for one in found if one] == [(2, 32), (8, 64), (4, 32)]


REFUSED = {
    "dynamic.+:.*down_proj: bits 5 is not supported": {**GPTQ, "dynamic": {"+:.*down_proj": {"bits": 5}}},
    "dynamic.+:.*down_proj: group_size must be -1 or a multiple of 32": {
        **GPTQ, "dynamic": {"+:.*down_proj": {"group_size": 16}},
    },
    "dynamic.up: adapter is not supported": {**GPTQ, "dynamic": {"up": {"adapter": "lora"}}},
    "dynamic: '(.*)*' names no linears": {**GPTQ, "dynamic": {"+:(.*)*": {"bits": 8}}},
    "checkpoint_format 'gptq_p' is not supported": {**GPTQ, "checkpoint_format": "gptq_p"},
    "pack_dtype is not supported, got 'int16'": {"quant_method": "awq", "pack_dtype": "int16"},
    "version 'gemv_fast' is not supported": {"quant_method": "awq", "version": "gemv_fast"},
    "dynamic.up: bits 8 is not supported; known: 4": {"quant_method": "awq", "dynamic": {"up": {"bits": 8}}},
    "format 'float8_e5m2' is not supported": {**FP8, "format": "float8_e5m2"},
    "weight_scale_semantics 'scale' is not supported": {**FP8, "weight_scale_semantics": "scale"},
    "load_in_8bit False is not supported": {**BNB, "load_in_4bit": False},
    "bnb_4bit_quant_type 'nf5' is not supported": {**BNB, "bnb_4bit_quant_type": "nf5"},
    "quant_type.default: _type None is not supported": torchao({}),
    "quant_type.default: _type 'MXConfig' is not supported": torchao(typed("MXConfig")),
    "quant_type.default: _version 1 is not supported": torchao({**INT8, "_version": 1}),
    "int4_packing_format: _data 'TILE_PACKED_TO_4D' is not supported": torchao(
        typed("Int4WeightOnlyConfig", int4_packing_format=enum("Int4PackingFormat", "TILE_PACKED_TO_4D"))
    ),
    "granularity: _type 'PerBlock' is not supported": torchao(
        typed("Float8WeightOnlyConfig", granularity=[PER_ROW, {"_type": "PerBlock"}])
    ),
    "weight_dtype: _data 'float8_e5m2' is not supported": torchao(
        typed("Float8WeightOnlyConfig", weight_dtype=enum("torch.dtype", "float8_e5m2"))
    ),
    "axis 1 is not supported": torchao(
        typed("IntxWeightOnlyConfig", granularity={"_type": "PerAxis", "_data": {"axis": 1}})
    ),
    "_data: field_of_2027 is not supported": torchao(typed("Int8WeightOnlyConfig", field_of_2027=1)),
    "fqn_to_config: '(.*)*' names no linears": torchao(typed("FqnToConfig", fqn_to_config={"re:(.*)*": INT8})),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_not_known_is_refused_by_the_name_of_its_field(message):
    with pytest.raises(ModelError, match=rf"^config\.json: .*{re.escape(message)}"):
        scheme_of({"quantization_config": REFUSED[message]}, "config.json")


def test_torchao_that_leaves_every_matrix_as_it_is():
    rules = typed("FqnToConfig", fqn_to_config={"re:.*": None})
    assert scheme_of({"quantization_config": torchao(rules)}, "config.json") is None


def test_torchao_per_axis():
    kind = typed("IntxWeightOnlyConfig", granularity={"_type": "PerAxis", "_data": {"axis": 0}})
    scheme = scheme_of({"quantization_config": torchao(kind)}, "config.json")
    assert scheme is not None
    assert (scheme.bits, scheme.group) == (8, None)


UP = "model.layers.1.mlp.up_proj"
STATE = f"{UP}.weight.quant_state.bitsandbytes__nf4"


def text(value: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(value.encode()), dtype=torch.uint8)


DAMAGE = {
    f"tensor {UP}.weight.quant_map is missing": ("bitsandbytes nf4", lambda t: t.pop(f"{UP}.weight.quant_map")),
    f"tensor {STATE} is missing": ("bitsandbytes nf4", lambda t: t.pop(STATE)),
    f"tensor {UP}: quant_state is no JSON object": ("bitsandbytes nf4", lambda t: t.update({STATE: text("[")})),
    f"tensor {UP}: shape is [1, 2], the configuration asks for [256, 128]": (
        "bitsandbytes nf4",
        lambda t: t.update({STATE: text('{"shape": [1, 2]}')}),
    ),
    f"tensor {UP}: blocksize must be a positive whole number, got 0": (
        "bitsandbytes nf4",
        lambda t: t.update({STATE: text('{"shape": [256, 128], "blocksize": 0}')}),
    ),
    f"tensor {UP}.weight.absmax has 4 bytes, not those of 512 numbers": (
        "bitsandbytes nf4",
        lambda t: t.update({f"{UP}.weight.absmax": torch.ones(1)}),
    ),
    f"tensor {UP}: weight has 3 bytes, not 16384": (
        "bitsandbytes nf4",
        lambda t: t.update({f"{UP}.weight": torch.ones(3, dtype=torch.uint8)}),
    ),
    f"tensor {UP}: weight.absmax has 5 bytes, not 8": (
        "bitsandbytes, blocks across rows",
        lambda t: t.update({f"{UP}.weight.absmax": torch.ones(5, dtype=torch.uint8)}),
    ),
    f"tensor {UP}: nested_offset must be a number, got None": (
        "bitsandbytes, blocks across rows",
        lambda t: t.update({STATE: text('{"shape": [256, 128], "blocksize": 4096, "nested_blocksize": 3}')}),
    ),
    "tensor layers.1.up: a weight is no finite number": (
        "bitsandbytes nf4",
        lambda t: t[f"{UP}.weight.absmax"].fill_(torch.nan),
    ),
    f"tensor {UP}.weight_format is not supported; known is 0": (
        "bitsandbytes int8",
        lambda t: t.update({f"{UP}.weight_format": torch.tensor(1, dtype=torch.uint8)}),
    ),
    f"tensor {UP}._weight_scale is missing": ("torchao int8", lambda t: t.pop(f"{UP}._weight_scale")),
    f"tensor {UP}._weight_act_pre_scale is a factor of activations": (
        "torchao int8",
        lambda t: t.update({f"{UP}._weight_act_pre_scale": torch.ones(128)}),
    ),
    "tensor layers.1.up: a number is outside of those of 4 bits": (
        "torchao intx",
        lambda t: t[f"{UP}._weight_qdata"].fill_(8),
    ),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_a_matrix_that_cannot_be_is_refused_by_name(message, tmp_path):
    of, change = DAMAGE[message]
    folder = write_folder(wide_model(), tmp_path / "model", FORMATS[of])
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=re.escape(message)):
        open_checkpoint(folder).weights.tensor("layers.1.up").float32()


def test_numbers_of_a_codebook_have_no_form_of_whole_numbers():
    matrix = Codebook("m", (2, 32), np.zeros(32, np.uint8), np.zeros(16, np.float32), np.ones(1, np.float32), 64)
    assert not matrix.form
    with pytest.raises(ModelError, match="tensor m has no form of whole numbers"):
        matrix.number_pieces()
