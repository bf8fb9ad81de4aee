"""GGUF files beside a model's: LoRA adapters, which are loaded, projectors and others, which are told apart."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.checkpoints.families.mixers import DeltaRule
from kvloom.checkpoints.finding import find_weights
from kvloom.checkpoints.lora import read_adapter
from kvloom.checkpoints.lora_gguf import open_adapter
from kvloom.checkpoints.lora_tensors import lora_shapes, pairs_of
from kvloom.contract.errors import BadRequest, ModelError
from tests.support.models import delta_gguf
from tests.support.models.adapters import adapted, make_adapter
from tests.support.models.checkpoints import save, tiny_model

from .test_gguf import NAMES, interleave, write

Tensors = dict[str, np.ndarray[Any, Any]]


def of_folder(folder: Path, num_heads: dict[str, int] | None = None) -> Tensors:
    """A peft adapter's tensors as llama.cpp's converter names them; `num_heads`: of q and k, if interleaved."""
    found = {}
    for key, value in load_file(folder / "adapter_model.safetensors").items():
        _, _, _, _, layer, block, part, side, _ = key.split(".")
        name = f"{block}.{part}"
        if side == "lora_B" and num_heads and part in num_heads:
            value = interleave(value, num_heads[part])
        found[f"blk.{layer}.{NAMES[name]}.weight.{side.lower()}"] = value
    return found


def write_adapter(path: Path, tensors: Tensors, arch: str = "llama", kind: str = "", **metadata: Any) -> Path:
    """`kind`: a block type for all tensors. `metadata`: over what such files have, None for what is left out."""
    writer = gguf.GGUFWriter(path, arch)
    fields = {"general__type": "adapter", "adapter__type": "lora", "adapter__lora__alpha": 8.0} | metadata
    for key, value in fields.items():
        add = {str: writer.add_string, float: writer.add_float32, list: writer.add_array}.get(type(value))
        if add is not None:
            add(key.replace("__", "."), value)
    for name, value in tensors.items():
        if kind:
            type_ = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quants.quantize(value, type_), raw_dtype=type_)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(("name", "heads"), [("llama", {"q_proj": 4, "k_proj": 2}), ("qwen2", None)])
def test_an_adapter_in_a_gguf_file_is_that_of_the_folder(name, heads, tmp_path):
    spec = open_checkpoint(save(tiny_model(name), tmp_path / "model")).spec
    shapes = spec.tensor_shapes()
    folder = make_adapter(tmp_path / "peft", shapes, rank=4, lora_alpha=8)
    path = write_adapter(tmp_path / "a.gguf", of_folder(folder, heads), name)
    wanted = dict(pairs_of(read_adapter(folder, shapes), spec))
    adapter = open_adapter(path, shapes)
    found = dict(pairs_of(adapter, spec))
    assert found.keys() == wanted.keys()
    for key, pair in wanted.items():
        assert np.array_equal(found[key].a, pair.a), key
        assert np.array_equal(found[key].b, pair.b), key
        assert found[key].scale == pair.scale == 2
    assert adapter.rank == 4
    (tmp_path / "alone").mkdir()
    path.rename(tmp_path / "alone" / "a.gguf")
    assert open_adapter(tmp_path / "alone", shapes).digest == adapter.digest
    assert 7 * spec.num_layers == len(found)


@pytest.mark.parametrize("is_tiled", [False, True])
def test_value_heads_of_an_adapter_come_in_the_order_of_the_model(tmp_path, is_tiled):
    """Folders have those of a key head together, GGUF files of Qwen3.5 and adapters for them do not."""
    model = tiny_model("qwen3.5")
    adapted(model, tmp_path / "peft")
    spec = open_checkpoint(save(model, tmp_path / "model")).spec
    mixers = [
        replace(own, is_tiled=is_tiled) if isinstance(own, DeltaRule) else own for own in (e.mixer for e in spec.layers)
    ]
    spec = spec.with_mixers(mixers)
    found = {}
    for key, value in load_file(tmp_path / "peft" / "adapter_model.safetensors").items():
        _, _, _, _, layer, block, part, side, _ = key.split(".")
        name = NAMES.get(f"{block}.{part}") or delta_gguf.NAMES[f"{part}.weight"].removesuffix(".weight")
        if block == "linear_attn" and side == ("lora_A" if part == "out_proj" else "lora_B"):
            value = delta_gguf.tiled(model.config, f"{part}.weight", value)
        found[f"blk.{layer}.{name}.weight.{side.lower()}"] = value
    path = write_adapter(tmp_path / "a.gguf", found, "qwen35", adapter__lora__alpha=6.0)
    shapes = lora_shapes(spec)
    wanted = dict(pairs_of(open_adapter(tmp_path / "peft", shapes), spec))
    for name, pair in pairs_of(open_adapter(path, shapes), spec):
        other = wanted.pop(name)
        assert np.array_equal(pair.a, other.a), name
        assert np.array_equal(pair.b, other.b), name
    assert not wanted


def test_blocks_an_alpha_of_zero_and_invocations_are_read(tmp_path):
    dice = np.random.default_rng(0)
    sizes = {"a": (32, 64), "b": (3, 32)}
    values = {
        f"blk.0.ffn_down.weight.lora_{side}": dice.standard_normal(size, np.float32) for side, size in sizes.items()
    }
    adapter = open_adapter(
        write_adapter(
            tmp_path / "a.gguf", values, kind="Q8_0", adapter__lora__alpha=0.0, adapter__alora__invocation_tokens=[5, 6]
        ),
        None,
    )
    spec = open_checkpoint(save(tiny_model("qwen2"), tmp_path / "model")).spec
    ((name, pair),) = pairs_of(adapter, spec)
    quantised = gguf.GGMLQuantizationType.Q8_0
    for found, side in ((pair.a, "a"), (pair.b, "b")):
        value = values[f"blk.0.ffn_down.weight.lora_{side}"]
        assert np.array_equal(found, gguf.quants.dequantize(gguf.quants.quantize(value, quantised), quantised))
    assert (name, pair.scale, adapter.invocation) == ("layers.0.down", 1.0, (5, 6))


A, B = np.zeros((2, 8), np.float32), np.zeros((4, 2), np.float32)
PAIR = {"blk.0.attn_v.weight.lora_a": A, "blk.0.attn_v.weight.lora_b": B}
BAD: dict[str, tuple[Tensors, dict[str, Any], str]] = {
    "a model": (PAIR, {"general__type": "model"}, "general.type must be 'adapter', got 'model'"),
    "no lora": (PAIR, {"adapter__type": "dora"}, "adapter.type must be 'lora', got 'dora'"),
    "no number": (PAIR, {"adapter__lora__alpha": "x"}, "adapter.lora.alpha must be a number, got 'x'"),
    "an endless number": (PAIR, {"adapter__lora__alpha": float("inf")}, "adapter.lora.alpha must be a number, got inf"),
    "no tokens": (PAIR, {"adapter__alora__invocation_tokens": [-1]}, "invocation_tokens must be token ids"),
    "another tensor": ({"blk.0.ffn_gate_exps.weight.lora_a": A}, {}, "ffn_gate_exps.weight.lora_a is none of lora_a"),
    "one of a pair": ({"blk.0.attn_v.weight.lora_a": A}, {}, "attn_v.weight.lora_a has no partner"),
    "no tensor": ({}, {}, "the file holds no tensor"),
    "ranks at odds": (PAIR | {"blk.0.attn_v.weight.lora_b": A}, {}, "lora_b has shape [2, 8]"),
    "a layer too many": (
        {f"blk.7.attn_v.weight.lora_{side}": value for side, value in (("a", A), ("b", B))},
        {},
        "is of a layer that the base model does not have",
    ),
}


@pytest.mark.parametrize(("tensors", "metadata", "problem"), BAD.values(), ids=BAD)
def test_what_is_no_such_adapter_is_refused_in_a_sentence(tensors, metadata, problem, tmp_path):
    path = write_adapter(tmp_path / "a.gguf", tensors, **metadata)
    with pytest.raises(BadRequest) as told:
        open_adapter(path, {"layers.0.v": (4, 8)})
    assert problem in str(told.value)


def test_a_damaged_or_unknown_file_is_refused_in_a_sentence(tmp_path):
    path = write_adapter(tmp_path / "a.gguf", PAIR)
    data = path.read_bytes()
    for end in range(0, len(data), 7):
        path.write_bytes(data[:end])
        with pytest.raises(BadRequest, match=r"^lora_path: "):
            open_adapter(path, None)
    with pytest.raises(BadRequest, match="nosuch"):
        open_adapter(write_adapter(path, PAIR, arch="nosuch"), None)
    write_adapter(tmp_path / "b.gguf", PAIR)
    with pytest.raises(BadRequest, match=r"holds 2 \.gguf files \(a\.gguf, b\.gguf\); name one of them"):
        open_adapter(tmp_path, None)


def test_a_folder_says_what_its_files_are(tmp_path):
    write_adapter(tmp_path / "style.gguf", PAIR)
    with pytest.raises(ModelError, match=r"holds 1 adapter \(style\.gguf\); none of them is a model"):
        find_weights(tmp_path)
    model = write(tmp_path / "any.gguf", tiny_model("llama"), "llama")
    assert find_weights(tmp_path) == model
    write_adapter(tmp_path / "seeing.gguf", {}, arch="clip", general__type=None)
    write_adapter(tmp_path / "importance.gguf", {}, arch="imatrix", general__type="imatrix")
    assert find_weights(tmp_path) == model
    write(tmp_path / "other.gguf", tiny_model("llama"), "llama")
    with pytest.raises(ModelError) as told:
        find_weights(tmp_path)
    models, others = "2 models (any.gguf, other.gguf)", "1 imatrix (importance.gguf), 1 projector (seeing.gguf)"
    wanted = f"{tmp_path}: holds {models}, {others}, 1 adapter (style.gguf); name one of the models"
    assert str(told.value) == wanted
