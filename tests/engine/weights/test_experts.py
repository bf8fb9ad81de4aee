"""Mixtures of experts on disk: MXFP4 as in gpt-oss's folders, quantised folders; impossible ones are refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvloom.checkpoints.checkpoint import Checkpoint, open_checkpoint
from kvloom.checkpoints.lora import read_adapter
from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import BadRequest, ModelError
from kvloom.rank.kernels.cpu import CpuBackend, CpuOptions
from kvloom.rank.kernels.reference import ReferenceBackend
from kvloom.rank.loading import open_runner
from tests.support.models.adapters import make_adapter
from tests.support.models.checkpoints import run_step, save, tiny_model
from tests.support.models.quantized import write_folder

from .test_families import FILES, TOKENS
from .test_gguf import add_tensor, write
from .test_gguf import rewrite as rewrite_file
from .test_quantized_folders import FORMATS

MXFP4 = gguf.GGMLQuantizationType.MXFP4


def logits_of(checkpoint: Checkpoint) -> torch.Tensor:
    return run_step(ReferenceBackend(checkpoint.spec, checkpoint.weights, 4), [TOKENS], [[2]])


def rewrite(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], None] = lambda tensors: None, **fields: Any
) -> Path:
    """Changes a folder's tensors by `change` and sets `fields` of its config.json; returns the folder."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | fields), encoding="utf-8")
    return folder


def blocks_of(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """gpt-oss's form of a weight [experts, in, out]: blocks of 32 values along `in`, two in a byte; and exponents."""
    rows = weight.swapaxes(1, 2).contiguous().numpy()
    blocks = torch.from_numpy(gguf.quants.quantize(rows, MXFP4).reshape(*rows.shape[:2], rows.shape[2] // 32, 17))
    halves = blocks[..., 1:]  # GGUF: the first 16 values of a block in low nibbles, the others in high ones
    numbers = torch.cat((halves & 15, halves >> 4), -1)
    return numbers[..., ::2] | numbers[..., 1::2] << 4, blocks[..., 0]


def pack_experts(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales = blocks_of(tensors.pop(name))
        tensors |= {f"{name}_blocks": blocks.contiguous(), f"{name}_scales": scales.contiguous()}


PACKED = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}


def test_experts_in_mxfp4_are_read_as_the_format_says(tmp_path):
    model = tiny_model("gpt-oss")
    folder = rewrite(save(model, tmp_path, "1GB"), pack_experts, **PACKED)
    for name, value in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            rows = value.detach().swapaxes(1, 2).contiguous().numpy()
            exact = gguf.quants.dequantize(gguf.quants.quantize(rows, MXFP4), MXFP4).reshape(rows.shape)
            value.data = torch.from_numpy(exact).swapaxes(1, 2).contiguous()
    checkpoint = open_checkpoint(folder)
    assert checkpoint.weights.form("layers.1.experts.3.up") == "fp4"
    assert checkpoint.weights.form("layers.1.experts.3.up_bias") == checkpoint.weights.form("layers.1.q") == ""
    with torch.no_grad():
        wanted = model(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits_of(checkpoint), wanted, atol=5e-4, rtol=1e-3)


ROUTERS = (
    "lm_head",
    "embed_tokens",
    "mlp.gate",
    "block_sparse_moe.gate",
    "shared_expert_gate",
)  # not quantised
SIZES = {"hidden_size": 128, "intermediate_size": 256}
PACKINGS = [
    ("qwen3 moe", "awq"),
    ("qwen3 moe", "gptq"),
    ("qwen3 moe", "gptq, act order"),
    ("qwen3 moe", "compressed, zeros"),
    ("qwen3 moe", "compressed, bytes"),
    ("qwen3 moe", "compressed, a scale a token"),
    ("qwen2 moe", "compressed, a scale a token"),
    ("qwen3 moe", "fp8 by block"),
    ("qwen3 moe", "compressed, mxfp4"),
    ("qwen2 moe", "gptq of 8 bits"),
    ("mixtral", "gptq"),
    ("mixtral", "awq of 128"),
    ("mixtral", "compressed"),
    ("olmoe", "gptq"),
]
OWN_SIZES = {
    "qwen3 moe": {"moe_intermediate_size": 128},
    "qwen2 moe": {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 192},
    "olmoe": {"num_experts_per_tok": 6},  # all experts: in 8 bits the router would choose others where scores are close
}


@pytest.mark.parametrize(("family", "name"), PACKINGS)
def test_experts_of_a_quantised_folder_keep_their_values(family, name, tmp_path):
    of = replace(FORMATS[name], left=ROUTERS)
    model = tiny_model(family, **SIZES, **OWN_SIZES.get(family, {}))
    checkpoint = open_checkpoint(write_folder(model, tmp_path, of))
    assert checkpoint.weights.form("layers.1.experts.3.up") == checkpoint.weights.form("layers.1.o") == of.form
    assert checkpoint.weights.form("layers.1.router") == ""
    with torch.no_grad():
        wanted = model(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits_of(checkpoint), wanted, atol=5e-4, rtol=1e-3)
    backend = CpuBackend(checkpoint.spec, checkpoint.weights, 4, CpuOptions("stored"))
    found = run_step(backend, [TOKENS], [[2]])
    assert float((found - wanted).norm() / wanted.norm()) < 0.05


def test_a_router_may_be_quantised_too(tmp_path):
    model = tiny_model("qwen3 moe", **SIZES, num_experts=8, moe_intermediate_size=128)
    checkpoint = open_checkpoint(write_folder(model, tmp_path, FORMATS["gptq"]))
    with torch.no_grad():
        wanted = model(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits_of(checkpoint), wanted, atol=5e-4, rtol=1e-3)


def test_a_folder_of_experts_is_served_by_the_kernels_and_an_adapter_of_experts_refused_by_name(tmp_path):
    folder = save(tiny_model("qwen3 moe"), tmp_path / "model")
    assert (
        open_runner(EngineConfig(model=str(folder), num_blocks=8), [], lambda done, total: None).info.backend == "cpu"
    )
    shapes = open_checkpoint(folder).spec.tensor_shapes()
    adapter = make_adapter(tmp_path / "adapter", shapes, parts=("q",))
    assert read_adapter(adapter, shapes).modules.keys() == {"layers.0.q", "layers.1.q"}
    path = adapter / "adapter_model.safetensors"
    attention, tensors = load_file(path), {}
    for own, problem in (
        ("mlp.experts.1.gate_proj", "mlp.experts.1.gate_proj.lora_A.weight is none of lora_A"),
        ("mlp.gate_proj", "mlp.gate_proj.lora_A.weight is of a layer that the base model does not have"),
    ):
        tensors = {key.replace("self_attn.q_proj", own): value for key, value in attention.items()}
        save_file(tensors, path)
        with pytest.raises(BadRequest, match=problem):
            read_adapter(adapter, shapes)


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[name]

    return change


def rename(name: str, other: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[other] = tensors.pop(name)

    return change


def cut(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name][:-1].contiguous()

    return change


STACK = "model.layers.1.block_sparse_moe.input_linear"
BAD: list[tuple[str, Any, dict[str, Any], str]] = [
    ("mixtral", None, {"num_local_experts": None}, "num_local_experts or num_experts is missing"),
    ("mixtral", None, {"num_local_experts": 0}, "num_local_experts must be a positive whole number, got 0"),
    ("mixtral", None, {"num_local_experts": 1 << 30}, "num_local_experts is 1073741824 in each of 2 layers, more than"),
    ("mixtral", None, {"num_local_experts": "5"}, "num_local_experts must be a positive whole number, got '5'"),
    ("mixtral", None, {"num_experts_per_tok": 6}, "num_experts_per_tok is 6, more than the 5 of num_local_experts"),
    ("mixtral", None, {"num_experts_per_tok": 0}, "num_experts_per_tok must be a positive whole number, got 0"),
    ("mixtral", drop("model.layers.1.block_sparse_moe.experts.4.w2.weight"), {}, "experts.4.w2.weight is missing"),
    ("mixtral", drop("model.layers.0.block_sparse_moe.gate.weight"), {}, "block_sparse_moe.gate.weight is missing"),
    ("mixtral", cut("model.layers.0.block_sparse_moe.experts.0.w1.weight"), {}, r"has shape \[95, 64\]"),
    ("mixtral", None, {"num_local_experts": 6}, r"gate.weight has shape \[5, 64\]|experts.5.w1.weight is missing"),
    ("qwen3 moe", None, {"mlp_only_layers": "all"}, "mlp_only_layers must be a list of layers, got 'all'"),
    ("qwen3 moe", None, {"moe_intermediate_size": -1}, "moe_intermediate_size must be a positive whole number, got -1"),
    ("qwen3 moe", None, PACKED, "quant_method mxfp4 is for the experts of gpt-oss, not for qwen3_moe"),
    ("olmoe", None, {"clip_qkv": 8.0}, "clip_qkv is not supported, got 8.0"),
    ("granite moe", cut("model.layers.0.block_sparse_moe.output_linear.weight"), {}, r"has shape \[4, 64, 96\]"),
    (
        "granite moe",
        rename(f"{STACK}.weight", f"{STACK}.qweight"),
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}},
        f"{STACK} is quantised and holds all experts of its layer; quantised experts need tensors of their own",
    ),
    ("gpt-oss", cut("model.layers.0.self_attn.sinks"), {}, r"self_attn.sinks has shape \[3\]"),
    ("gpt-oss", None, PACKED, "experts.gate_up_proj_blocks is missing"),
    ("gpt-oss", None, {**PACKED, "intermediate_size": 100}, "experts of 100 columns do not fill MXFP4's groups of 32"),
]


@pytest.mark.parametrize(("name", "change", "fields", "problem"), BAD, ids=[f"{bad[0]}-{bad[3][:30]}" for bad in BAD])
def test_a_folder_that_cannot_be_is_refused_in_a_sentence(name, change, fields, problem, tmp_path):
    folder = rewrite(save(tiny_model(name), tmp_path, "1GB"), change or (lambda tensors: None), **fields)
    with pytest.raises(ModelError, match=problem) as error:
        open_checkpoint(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("expert_count", 0, "tensor blk.0.ffn_gate.weight is missing"),  # means a dense model
        ("expert_count", -1, "num_local_experts must be a positive whole number, got -1"),
        ("expert_count", 7, r"ffn_gate_inp.weight has shape \[5, 64\], the configuration asks for \[7, 64\]"),
        ("expert_used_count", 9, "num_experts_per_tok is 9, more than the 5"),
        ("expert_feed_forward_length", 95, r"ffn_gate_exps.weight has shape \[5, 96, 64\]"),
    ],
)
def test_a_gguf_file_that_cannot_be_is_refused_in_a_sentence(key, value, problem, tmp_path):
    _, metadata, _ = FILES["mixtral"]
    metadata = {f"llama__{name}": number for name, number in (metadata | {key: value}).items()}
    with pytest.raises(ModelError, match=problem):
        open_checkpoint(write(tmp_path / "m.gguf", tiny_model("mixtral"), "llama", **metadata))


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "MXFP4"])
def test_stacked_experts_of_a_quantised_file_keep_their_values(kind, tmp_path):
    arch, metadata, _ = FILES["gpt-oss"]
    model = tiny_model("gpt-oss", swiglu_limit=7.0)
    path = write(tmp_path / "m.gguf", model, arch, kind, **{f"{arch}__{key}": value for key, value in metadata.items()})
    quantised = gguf.GGMLQuantizationType[kind]
    for name, value in model.named_parameters():
        if value.dim() > 1 and "router" not in name and "_bias" not in name:
            is_stack = value.dim() == 3
            rows = (value.detach().swapaxes(1, 2) if is_stack else value.detach()).contiguous().numpy()
            exact = gguf.quants.dequantize(gguf.quants.quantize(rows, quantised), quantised).reshape(rows.shape)
            value.data = torch.from_numpy(exact.swapaxes(1, 2) if is_stack else exact).contiguous()
    checkpoint = open_checkpoint(path)
    assert checkpoint.weights.form("layers.0.experts.4.down") == checkpoint.weights.form("layers.0.q") != ""
    with torch.no_grad():
        wanted = model(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits_of(checkpoint), wanted, atol=5e-4, rtol=1e-3)


@pytest.mark.parametrize("count", [1, 5])
def test_scales_beside_a_stack_are_factors_of_its_experts(count, tmp_path):
    _, metadata, _ = FILES["mixtral"]
    metadata = {f"llama__{key}": value for key, value in metadata.items()}
    path = write(tmp_path / "m.gguf", tiny_model("mixtral"), "llama", **metadata)
    scales = np.arange(1, count + 1, dtype=np.float32) / 4
    scaled = add_tensor(path, tmp_path / "s.gguf", "blk.0.ffn_up_exps.scale", scales)
    before, after = open_checkpoint(path).weights, open_checkpoint(scaled).weights
    for expert in range(5):
        name = f"layers.0.experts.{expert}.up"
        wanted = before.tensor(name).float32() * scales[expert % count]
        assert np.array_equal(after.tensor(name).float32(), wanted)


@pytest.mark.parametrize("kind", ["", "Q8_0"])
def test_a_file_may_have_a_tensor_for_each_expert(kind, tmp_path):
    _, metadata, _ = FILES["mixtral"]
    metadata = {f"llama__{key}": value for key, value in metadata.items()}
    path = write(tmp_path / "m.gguf", tiny_model("mixtral"), "llama", kind or None, **metadata)

    def unstacked(name: str, values: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
        if not name.endswith("_exps.weight"):
            return {name: values}
        return {name.replace("_exps.", f".{expert}."): own for expert, own in enumerate(values)}

    apart, stacked = open_checkpoint(rewrite_file(path, tmp_path / "s.gguf", unstacked)), open_checkpoint(path)
    assert apart.spec == stacked.spec
    assert apart.unread == ()
    for name in stacked.weights.names():
        assert apart.weights.form(name) == stacked.weights.form(name)
        assert np.array_equal(apart.weights.tensor(name).float32(), stacked.weights.tensor(name).float32())
