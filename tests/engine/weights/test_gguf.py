"""GGUF files written with the gguf package: names, shapes, every block type, and damage."""

import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from kvloom.checkpoints import source as weight_source
from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.checkpoints.gguf_types import GGUF_TYPES
from kvloom.checkpoints.quantized.numbers import LEVELS
from kvloom.contract.errors import ModelError
from kvloom.rank.kernels.reference import ReferenceBackend
from tests.support.models import delta_gguf, gemma4_gguf, kimi_gguf, latent_gguf, mamba_gguf
from tests.support.models.checkpoints import run_step, tiny_model

TOKENS = [5, 9, 1, 77, 30, 2, 2, 101]
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.gate.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_experts.": "mlp.shared_expert.",
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.gate": "ffn_gate_inp",
    "model.embedding_norm": "token_embd_norm",
    "operator_norm": "attn_norm",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    **latent_gguf.NAMES,
}


PERMUTED = ("llama", "mistral3", "smollm3", "granite", "granitemoe", "granitehybrid")
STATES = ("conv", "linear_attention", "mlp", "moe")  # kinds of layers without attention
EPSILONS = ("norm_eps", "rms_norm_eps", "layer_norm_epsilon")
GEMMA = ("gemma", "gemma2", "gemma3", "gemma-embedding")  # files have one more in the weights of norms


_NEVER_QUANTISED = ("router", "mlp.gate.", "bias", "conv1d")


def gguf_name(key: str, arch: str = "llama") -> str:
    if arch in (*GEMMA[1:], "gemma4", "olmo2", "gpt-oss", "exaone4", "seed_oss", "glm4moe", *delta_gguf.ARCHITECTURES):
        key = key.replace("post_attention_layernorm", "post_attention_norm")
    for theirs, ours in (gemma4_gguf.NAMES | NAMES if arch == "gemma4" else NAMES).items():
        key = key.replace(theirs, ours)
    return key.replace("model.layers.", "blk.")


def interleave(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Rows of q and k as Llama's GGUF files hold them: RoPE partners side by side."""
    return weight.reshape(num_heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def tensors_of(model: Any, arch: str) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """A transformers model's tensors as GGUF files have them: gates of all experts in one stack, ups in another."""
    for key, value in model.state_dict().items():
        key, data = mamba_gguf.plain(key), value.numpy()
        if ".linear_attn." in key:
            yield from delta_gguf.converted(model.config, arch, key.split(".")[2], key.split(".linear_attn.")[1], data)
            continue
        if ".mamba." in key or ".shared_mlp." in key:
            yield from mamba_gguf.converted(model.config, key, data)
            continue
        if arch == kimi_gguf.ARCHITECTURE and ".experts." not in key:
            yield from kimi_gguf.converted(model.config, key, data)
            continue
        if arch in latent_gguf.ARCHITECTURES and ".experts." not in key:
            yield from latent_gguf.converted(model.config, key, data)
            continue
        if ".experts." not in key or arch == "gemma4":
            yield key, data[:, 0] if key.endswith("conv.conv.weight") else data
            continue
        layer, end = key.split(".")[2], "bias" if key.endswith("bias") else "weight"
        if arch == "gpt-oss" and end == "weight":
            data = data.swapaxes(1, 2)
        if "gate_up" not in key:
            yield f"blk.{layer}.ffn_{'up' if 'up_proj' in key else 'down'}_exps.{end}", data
            continue
        half = data.shape[1] // 2
        parts = (data[:, ::2], data[:, 1::2]) if arch == "gpt-oss" else (data[:, :half], data[:, half:])
        for name, part in zip(("gate", "up"), parts, strict=True):
            yield f"blk.{layer}.ffn_{name}_exps.{end}", part


def widths_of(model: Any) -> int | list[int]:
    """Of MLPs: of LFM2's what is adjusted; of each layer where some have none."""
    config, kinds = model.config, getattr(model.config, "layer_types", None) or []
    if "mlp" in kinds or "moe" in kinds:
        return [config.intermediate_size * (kind in ("mlp", "moe")) for kind in kinds]
    adjusted = [value.shape[0] for key, value in model.state_dict().items() if key.endswith("feed_forward.w1.weight")]
    return adjusted[0] if adjusted else config.intermediate_size


def sizes_of(model: Any, arch: str) -> dict[str, Any]:
    """What files of all architectures say."""
    config, ropes = model.config, getattr(model.config, "rope_parameters", None) or {"rope_theta": 1e4}
    eps = "attention__layer_norm_epsilon" if arch.startswith("nemotron") else "attention__layer_norm_rms_epsilon"
    own: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": widths_of(model),
        "attention__head_count": config.num_attention_heads,
        eps: next(getattr(config, key) for key in EPSILONS if hasattr(config, key)),
        "rope__freq_base": ropes.get("full_attention", ropes)["rope_theta"],
    }
    if arch == "gemma4":
        return own
    if arch == kimi_gguf.ARCHITECTURE:
        return own | kimi_gguf.sizes_of(config)
    counts = [config.num_key_value_heads * (kind not in STATES) for kind in getattr(config, "layer_types", None) or []]
    is_hybrid = 0 in counts and arch not in delta_gguf.ARCHITECTURES
    own["attention__head_count_kv"] = counts if is_hybrid else config.num_key_value_heads
    return own | ({"attention__key_length": config.head_dim} if getattr(config, "head_dim", None) else {})


def write(
    path: Path,
    model: Any,
    arch: str,
    quantised: str | None = None,
    beside: Mapping[str, np.ndarray[Any, Any]] = MappingProxyType({}),
    **metadata: Any,
) -> Path:
    """Writes a transformers model as a GGUF file; matrices have block type `quantised` where it fits. `beside`: more
    tensors, by their names there.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    if arch == "gemma4":
        metadata = gemma4_gguf.metadata_of(config) | metadata
        writer.add_tensor("rope_freqs.weight", gemma4_gguf.rope_divisors(config))
    if arch in latent_gguf.ARCHITECTURES:
        metadata = latent_gguf.metadata_of(config, arch) | metadata
    metadata = {f"{arch}__{key}": value for key, value in sizes_of(model, arch).items()} | metadata
    if arch in delta_gguf.ARCHITECTURES:
        metadata = delta_gguf.metadata_of(config, arch) | metadata
    if arch in mamba_gguf.ARCHITECTURES:
        metadata = mamba_gguf.metadata_of(config, arch) | metadata
    for key, value in metadata.items():
        kind = gguf.GGUFValueType.get_type(value)
        writer.add_key_value(key.replace("__", "."), value, kind, _item_kind(value))
    for key, data in tensors_of(model, arch):
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if key.endswith(("shared_expert_gate.weight", "moe_statics.e_score_correction_bias")):
            data = data[0]
        if arch in (*GEMMA, *delta_gguf.ARCHITECTURES) and key.endswith("norm.weight") and "ssm_" not in key:
            data = data + 1
        if arch in PERMUTED and (".q_proj." in key or ".k_proj." in key):
            data = interleave(data, config.num_attention_heads if ".q_" in key else config.num_key_value_heads)
        if quantised and data.ndim > 1 and not any(part in key for part in _NEVER_QUANTISED):
            kind = gguf.GGMLQuantizationType[quantised]
            packed = gguf.quants.quantize(np.ascontiguousarray(data), kind)
            writer.add_tensor(gguf_name(key, arch), packed, raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(key, arch), np.ascontiguousarray(data))
    _add(writer, beside)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, tensors: Mapping[str, np.ndarray[Any, Any]]) -> None:
    for key, data in tensors.items():
        writer.add_tensor(key, np.ascontiguousarray(data))


def _item_kind(value: Any) -> gguf.GGUFValueType | None:
    return gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None


def backend_of(path: Path) -> ReferenceBackend:
    checkpoint = open_checkpoint(path)
    return ReferenceBackend(checkpoint.spec, checkpoint.weights, 4)


@pytest.mark.parametrize(
    ("name", "arch"),
    [("llama", "llama"), ("llama, tied", "llama"), ("qwen2", "qwen2"), ("qwen2, tied", "qwen2"), ("qwen3", "qwen3")],
)
def test_a_gguf_file_gives_the_logits_of_the_model_it_was_made_from(name, arch, tmp_path):
    model = tiny_model(name)
    backend = backend_of(write(tmp_path / "m.gguf", model, arch))
    with torch.no_grad():
        wanted = model(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(run_step(backend, [TOKENS], [[2]]), wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4"])
def test_each_block_type_is_read_as_the_gguf_package_reads_it(kind, tmp_path):
    model = tiny_model("llama")
    path = write(tmp_path / "m.gguf", model, "llama", quantised=kind)
    source = open_checkpoint(path).weights
    for name, key in (("embed", "model.embed_tokens.weight"), ("layers.0.gate", "model.layers.0.mlp.gate_proj.weight")):
        raw, weight = source.tensor(name), model.state_dict()[key].numpy()
        type_ = gguf.GGMLQuantizationType[kind]
        wanted = gguf.quants.dequantize(gguf.quants.quantize(weight, type_), type_)
        assert raw.unchecked.kind == kind.lower()
        assert np.array_equal(raw.float32(), wanted)


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_k_blocks_are_read_as_the_gguf_package_reads_them(kind, tmp_path):
    model = tiny_model("llama", hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    path = write(tmp_path / "m.gguf", model, "llama")
    reader = gguf.GGUFReader(path)
    type_ = gguf.GGMLQuantizationType[kind]
    _, size = gguf.GGML_QUANT_SIZES[type_]
    blocks = np.random.default_rng(0).integers(0, 60, (256, size), dtype=np.uint8)  # small bytes keep the scales finite
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        if tensor.name == "blk.0.ffn_up.weight":
            writer.add_tensor(tensor.name, blocks, raw_dtype=type_)
        else:
            writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    values = open_checkpoint(tmp_path / "k.gguf").weights.tensor("layers.0.up").float32()
    assert values.shape == (256, 256)
    assert np.array_equal(values, gguf.quants.dequantize(blocks, type_))


Change = Callable[[str, np.ndarray[Any, Any]], Mapping[str, np.ndarray[Any, Any]]]


def rewrite(source: Path, path: Path, change: Change) -> Path:
    """Copies a GGUF file. `change`: what is written instead of a tensor, by name."""
    reader, writer = gguf.GGUFReader(source), gguf.GGUFWriter(path, "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        for name, values in change(tensor.name, np.array(tensor.data)).items():
            is_own = values.dtype == tensor.data.dtype
            writer.add_tensor(name, values, raw_dtype=tensor.tensor_type if is_own else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tensor(source: Path, path: Path, name: str, values: np.ndarray[Any, Any]) -> Path:
    """Copies a GGUF file with one more tensor of float32 or float16."""
    return rewrite(source, path, lambda key, own: {key: own} | ({name: values} if key == "output_norm.weight" else {}))


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "F16"])
def test_a_scale_beside_a_matrix_is_a_factor_of_its_values(kind, tmp_path):
    plain = write(tmp_path / "m.gguf", tiny_model("llama"), "llama", quantised=kind)
    scaled = add_tensor(plain, tmp_path / "s.gguf", "blk.0.ffn_up.scale", np.array([0.375], np.float32))
    before, after = open_checkpoint(plain), open_checkpoint(scaled)
    assert after.unread == ()
    for name, factor in {"layers.0.up": 0.375, "layers.0.gate": 1}.items():
        wanted = before.weights.tensor(name).float32() * np.float32(factor)
        assert np.array_equal(after.weights.tensor(name).float32(), wanted)
        if form := after.weights.form(name):
            pieces = [numbers.floats(LEVELS[form]) for _, numbers in after.weights.tensor(name).number_pieces()]
            assert np.allclose(np.concatenate(pieces), wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("values", [np.ones(2, np.float32), np.ones(1, np.float16)])
def test_a_scale_of_another_shape_or_type_is_refused(values, tmp_path):
    plain = write(tmp_path / "m.gguf", tiny_model("llama"), "llama")
    scaled = add_tensor(plain, tmp_path / "s.gguf", "blk.0.ffn_up.scale", values)
    checkpoint = open_checkpoint(scaled)
    with pytest.raises(ModelError, match=r"tensor blk\.0\.ffn_up\.scale is F.. of shape \[\d\], not F32 of \[1\]"):
        checkpoint.weights.tensor("layers.0.up")


def test_block_types_that_are_not_known_are_refused_by_name(tmp_path):
    path = write(tmp_path / "m.gguf", tiny_model("llama"), "llama", quantised="Q8_0")
    of_up = b"blk.1.ffn_up.weight" + struct.pack("<IQQ", 2, 64, 96)
    head, _, tail = path.read_bytes().partition(of_up)
    path.write_bytes(head + of_up + struct.pack("<I", gguf.GGMLQuantizationType.I8) + tail[4:])
    with pytest.raises(ModelError, match=r"tensor blk\.1\.ffn_up\.weight is I8; known are F32, .*Q4_K.*IQ4_NL"):
        open_checkpoint(path)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "F16", "F32"])
def test_pieces_of_a_tensor_are_the_tensor(kind, tmp_path, monkeypatch):
    path = write(tmp_path / "m.gguf", tiny_model("llama"), "llama", quantised=kind)
    raw = open_checkpoint(path).weights.tensor("layers.0.gate")
    monkeypatch.setattr(weight_source, "_PIECE_VALUES", 5 * raw.shape[1])
    pieces = list(raw.float32_pieces())
    assert [at for at, _ in pieces] == list(range(0, raw.shape[0], 5))
    assert np.array_equal(np.concatenate([values for _, values in pieces]), raw.float32())


def test_raw_rows_of_q_move_as_a_whole(tmp_path):
    model = tiny_model("llama")
    source = open_checkpoint(write(tmp_path / "m.gguf", model, "llama", quantised="Q4_0")).weights
    type_ = gguf.GGMLQuantizationType.Q4_0
    wanted = gguf.quants.quantize(model.state_dict()["model.layers.0.self_attn.q_proj.weight"].numpy(), type_)
    assert np.array_equal(source.tensor("layers.0.q").unchecked.data, wanted)


def test_rope_scaling_comes_from_metadata_and_from_frequency_factors(tmp_path):
    plain = open_checkpoint(write(tmp_path / "a.gguf", tiny_model("llama"), "llama")).spec.ropes[0]
    scaled = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}
    linear = open_checkpoint(write(tmp_path / "b.gguf", tiny_model("llama"), "llama", **scaled)).spec.ropes[0]
    assert linear.inv_freq == pytest.approx([f / 4 for f in plain.inv_freq])


def test_a_file_cut_short_anywhere_is_a_model_error(tmp_path):
    whole = write(tmp_path / "m.gguf", tiny_model("llama"), "llama").read_bytes()
    path = tmp_path / "cut.gguf"
    for length in [*range(0, 1200, 37), len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            open_checkpoint(path)


def test_an_unknown_architecture_lists_the_known_ones(tmp_path):
    with pytest.raises(ModelError, match=r"bloom.*known are [^A-Z]*, llama, [^A-Z]*; vLLM") as error:
        open_checkpoint(write(tmp_path / "m.gguf", tiny_model("llama"), "bloom"))
    assert "ForCausalLM" not in str(error.value), "those are names of folders"


def test_a_missing_and_a_misshapen_tensor_are_named(tmp_path):
    model = tiny_model("llama")
    path = write(tmp_path / "m.gguf", model, "qwen2")
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q\.bias is missing"):
        open_checkpoint(path)
    metadata = {"llama__attention__key_length": 8}
    with pytest.raises(ModelError, match=r"attn_q\.weight has shape \[64, 64\], the configuration asks for \[32, 64\]"):
        open_checkpoint(write(tmp_path / "n.gguf", model, "llama", **metadata))


def test_the_types_are_those_of_the_gguf_package():
    wanted = {kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    assert wanted == {number: kind for number, kind in GGUF_TYPES.items() if kind.name != "Q2_0"}  # llama.cpp's newest
