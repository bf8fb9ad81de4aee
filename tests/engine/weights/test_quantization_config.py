"""quantization_config of folders: fields that are refused by name, and what the makers of such folders write."""

import re
from typing import Any

import pytest

from kvloom.checkpoints.quantized.packed import PackedMatrix
from kvloom.checkpoints.quantized.rotations import Rotation
from kvloom.checkpoints.quantized.scheme import scheme_of
from kvloom.contract.errors import ModelError
from tests.support.models.quantized import group_config, per_token

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}


def rotated(*locations: str, targets: Any = ("Linear",), ignore: Any = (), **scheme: Any) -> dict[str, Any]:
    where = {"targets": list(targets), "ignore": list(ignore) if isinstance(ignore, tuple) else ignore}
    uses = [{**where, "location": one, "inverse": False} for one in locations]
    own = {"type": "hadamard", "apply": uses, "randomize": False, "requires_grad": False, "head_dim": 64, **scheme}
    transforms = {"config_groups": {"R4": {**own, "precision": "torch.float32"}}}
    return {**group_config("pack-quantized", num_bits=4, strategy="channel"), "transform_config": transforms}


REFUSED = {
    "weights quantised by 'quanto' are not supported": {"quant_method": "quanto"},
    "weights quantised by 'an unnamed method' are not supported": {"bits": 4},
    "must be an object": "awq",
    "bits 3 is not supported; known: 4": {"quant_method": "awq", "bits": 3},
    "bits True is not supported": {"quant_method": "awq", "bits": True},
    "zero_point 0 is not supported": {"quant_method": "awq", "zero_point": 0},
    "field_of_2027 is not supported, got 1": {"quant_method": "awq", "field_of_2027": 1},
    "rotation is not supported, got 'hadamard'": {"quant_method": "gptq", "rotation": "hadamard"},
    "pack_dtype is not supported, got 'int8'": {"quant_method": "gptq", "pack_dtype": "int8"},
    "extra_config is not supported, got {'a': {'bits': 8}}": {
        "quant_method": "gptq", "extra_config": {"a": {"bits": 8}},
    },
    "extra_config: 'lm_head' has settings of its own": {
        "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq",
        "extra_config": {"lm_head": {"bits": 8}},
    },
    "packing_format 'auto_round' is not supported": {"quant_method": "auto-round", "packing_format": "auto_round"},
    "expert_dtype is not supported, got 'fp4'": {"quant_method": "fp8", "expert_dtype": "fp4"},
    "format 'gptq' is not supported; known: 'gemm', 'GEMM', 'gemv', 'GEMV'": {"quant_method": "awq", "format": "gptq"},
    "transform_config.config_groups.R4.apply: location 'output' is not supported": rotated("weight_output", "output"),
    "R4: type 'random-hadamard' is not supported": rotated("input", type="random-hadamard"),
    "transform_config.config_groups.R4: randomize True is not supported": rotated("input", randomize=True),
    "transform_config.config_groups.R4: head_dim must be -1 or a multiple of 32": rotated("input", head_dim=20),
    "R4.apply: targets must be names of linears": rotated("input", targets=["re:(a|b)*c"]),
    "R4.apply: ignore must be names of linears": rotated("input", ignore=3),
    "transform_config.config_groups.R4: apply must be a list of objects, got ['x']": {
        **group_config("pack-quantized", num_bits=4), "transform_config": {"config_groups": {"R4": {"apply": ["x"]}}},
    },
    "moe_sparsity_config is not supported": {
        **group_config("pack-quantized", num_bits=4), "moe_sparsity_config": {"method": "prune"},
    },
    "weights: field_of_2027 is not supported": group_config("pack-quantized", num_bits=4, field_of_2027=2),
    "weights: dynamic True is not supported": group_config("pack-quantized", num_bits=4, dynamic=True),
    "format None is not supported; known: 'pack-quantized'": {
        **group_config("mixed-precision", num_bits=4),
    },
    "group_size must be -1 or a multiple of 32, got 48": {"quant_method": "awq", "group_size": 48},
    "group_size must be -1 or a multiple of 32, got 0": {"quant_method": "gptq", "group_size": 0},
    "group_size must be -1 or a multiple of 32, got 'x'": {"quant_method": "gptq", "group_size": "x"},
    "bits 5 is not supported; known: 2, 3, 4, 8": {"quant_method": "gptq", "bits": 5},
    "dynamic must be an object, got [1]": {"quant_method": "gptq", "dynamic": [1]},
    "checkpoint_format 'marlin' is not supported": {"quant_method": "gptq", "checkpoint_format": "marlin"},
    "format 'marlin-24' is not supported": {
        "quant_method": "compressed-tensors", "format": "marlin-24",
    },
    "format None is not supported": {"quant_method": "compressed-tensors"},
    "config_groups.b: targets must be names of linears": {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {
            "a": {"weights": {"num_bits": 8}}, "b": {"weights": {"num_bits": 4}, "targets": ["re:(.*)*"]},
        },
    },
    "config_groups has no group with weights": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": {"weights": None}},
    },
    "config_groups must be an object": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": [1],
    },
    "num_bits 2 is not supported": group_config("pack-quantized", num_bits=2),
    "strategy 'token' is not supported": group_config("int-quantized", num_bits=8, strategy="token"),
    "block_structure must be two sizes, got None": group_config(
        "float-quantized", num_bits=8, type="float", strategy="block"
    ),
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


def test_rotations_that_weights_were_stored_with_leave_nothing_to_do():
    """As SpinQuant's R1 and R2: the embedding, and what reads and writes the states, are rotated in the file."""
    config = rotated("weight_output", "weight_input")
    plain = {name: value for name, value in config.items() if name != "transform_config"}
    found, wanted = (scheme_of({"quantization_config": one}, "config.json") for one in (config, plain))
    assert found == wanted


COMPRESSED = {  # what compressed-tensors 0.20.0 writes for its preset W4A16
    "config_groups": {"W4A16": {
        "targets": ["Linear"], "input_activations": None, "output_activations": None, "format": "pack-quantized",
        "weights": {
            "num_bits": 4, "type": "int", "symmetric": True, "group_size": 128, "strategy": "group", "dynamic": False,
        },
    }},
    "quant_method": "compressed-tensors", "version": "0.20.0", "kv_cache_scheme": None, "format": "pack-quantized",
    "quantization_status": "compressed", "global_compression_ratio": None, "ignore": ["lm_head"],
    "moe_sparsity_config": None, "sparsity_config": {}, "transform_config": {},
}  # fmt: skip
TRANSFORMERS = {  # what transformers 5.24 adds for GPTQConfig and AwqConfig
    "tokenizer": None, "dataset": None, "damp_percent": 0.1, "desc_act": False, "act_group_aware": True, "sym": True,
    "true_sequential": True, "meta": None, "backend": "auto", "model_seqlen": None, "block_name_to_quantize": None,
    "module_name_preceding_first_block": None, "batch_size": 1, "pad_token_id": None, "max_input_length": None,
    "cache_block_outputs": True, "modules_in_block_to_quantize": None, "modules_to_not_convert": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (COMPRESSED, "packed"),
        ({**TRANSFORMERS, "quant_method": "awq", "version": "gemm", "format": "gemm", "zero_point": True}, "awq"),
        ({**TRANSFORMERS, "quant_method": "gptq", "format": "gptq", "checkpoint_format": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, "mxfp4_experts"),
    ],
)
def test_what_the_makers_write_is_read(config, layout):
    assert scheme_of({"quantization_config": config}, "config.json").layout == layout


@pytest.mark.parametrize("rules", [None, {}, {"-:lm_head": {}}, {"+:.*down_proj": {}}])
def test_rules_that_change_nothing_but_leave_matrices_out_are_read(rules):
    assert scheme_of({"quantization_config": {**GPTQ, "dynamic": rules}}, "config.json") == scheme_of(
        {"quantization_config": GPTQ}, "config.json"
    )


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_not_known_is_refused_by_the_name_of_its_field(message):
    with pytest.raises(ModelError, match=rf"^config\.json: .*{re.escape(message)}"):
        scheme_of({"quantization_config": REFUSED[message]}, "config.json")


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


@pytest.mark.parametrize(
    ("targets", "module", "expected"),
    [
        (["Linear"], "model.layers.0.mlp.down_proj", True),
        (["re:.*down_proj$"], "model.layers.0.mlp.down_proj", True),
        (["re:.*down_proj$"], "model.layers.0.mlp.down_proj.x", False),
        (["re:.*down_proj"], "model.layers.0.mlp.down_proj.x", True),
        (["re:model.layers.1"], "model.layers.10.mlp.down_proj", True),
        (["re:model.layers.1$"], "model.layers.10.mlp.down_proj", False),
        (["down_proj", "a"], "model.layers.0.mlp.down_proj", False),
        (["model.layers.0.mlp.down_proj"], "model.layers.0.mlp.down_proj", True),
        ([r"re:.*layers\.(?:0|11)\.mlp\.(up|down)_proj$"], "model.layers.0.mlp.down_proj", True),
        ([r"re:.*layers\.(?:0|11)\.mlp\.(up|down)_proj$"], "model.layers.1.mlp.down_proj", False),
        ([r"re:^model\.layers\.\d+\..*_proj$"], "model.layers.10.mlp.down_proj", True),
        (["re:.*layers.[0-4].*"], "model.layers.5.mlp.down_proj", False),
    ],
)
def test_which_linears_a_rotation_is_of(targets, module, expected):
    (rotation,) = scheme_of({"quantization_config": rotated("input", targets=targets)}, "config.json").rotations
    assert rotation.applies(module) is expected
    assert not Rotation("R4", rotation.targets, rotation.targets, None).applies(module)


TWO_KINDS = {
    "a": {"targets": ["Linear", "m.layers.2.mlp.up"], "weights": {"num_bits": 4}},
    "b": {"targets": ["re:.*mlp.*"], "weights": {"num_bits": 8}},
    "c": {"targets": ["m.layers.1.mlp.up"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 64}},
}


@pytest.mark.parametrize(
    ("module", "bits", "group"),
    [
        ("m.layers.0.q", 4, None),
        ("m.layers.0.mlp.up", 8, None),
        ("m.layers.1.mlp.up", 4, 64),
        ("m.layers.2.mlp.up", 4, None),
    ],
)
def test_a_name_goes_before_an_expression_and_an_expression_before_all_linears(module, bits, group):
    """match_targets of compressed-tensors 0.20."""
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": TWO_KINDS}
    own = scheme_of({"quantization_config": config}, "config.json").of(module)
    assert (own.bits, own.group) == (bits, group)


def test_a_linear_that_no_target_names_is_not_quantised():
    groups = {name: TWO_KINDS[name] for name in ("b", "c")}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    assert scheme_of({"quantization_config": config}, "config.json").of("m.layers.0.q") is None


def test_a_rotation_must_fit_the_inputs():
    whole, parts = Rotation("R4", (), (), None), Rotation("R4", (), (), 64)
    assert (whole.size_of("m", 256), parts.size_of("m", 192)) == (256, 64)
    for rotation, cols in ((whole, 192), (parts, 96)):
        with pytest.raises(ModelError, match=rf"m: rotation R4 of \d+ of {cols} inputs is not supported"):
            rotation.size_of("m", cols)


def test_a_folder_whose_cache_alone_is_quantised_has_plain_weights():
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    config = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "kv_cache_scheme": cache}
    assert scheme_of({"quantization_config": config}, "config.json") is None
