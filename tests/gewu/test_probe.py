"""What a model path holds, found out without loading it."""

import json
import os
import struct
from pathlib import Path

import pytest

from kvloom.gewu.codes import Code, Refused
from kvloom.gewu.modelfiles import open_files
from kvloom.gewu.prober.probe import Found, probe

SHAPE = {
    "block_count": 2,
    "embedding_length": 64,
    "feed_forward_length": 128,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "context_length": 512,
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 1000,
}
KV_BYTES = 2 * 2 * 2 * 16 * 2  # keys and values, layers, KV heads, width of a head, bfloat16
WEIGHTS = 2 * (64 * (2 * (4 + 2) * 16 + 3 * 128) + 2 * 64) + 64 + 64 * 1000  # layers, norms, a head
WEIGHT_BYTES = int(WEIGHTS * (1 + 2 / 64)) + 2 * 64 * 1000  # eight bits and scales, a bfloat16 embedding


def look(path: Path) -> Found:
    fd = os.open(path, os.O_RDONLY)
    try:
        files = open_files(fd)
    finally:
        os.close(fd)
    try:
        return probe(files)
    finally:
        files.close()


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def write_gguf(path: Path, arch: str = "llama", shape: dict[str, int] = SHAPE, num_bytes: int = 0) -> Path:
    """Write only the header of a GGUF file, cut off inside its vocabulary, and extend the file to `num_bytes`."""
    pairs = [text("general.architecture") + struct.pack("<I", 8) + text(arch)]
    pairs += [text(f"{arch}.{key}") + struct.pack("<II", 4, value) for key, value in shape.items()]
    pairs += [text("tokenizer.ggml.model") + struct.pack("<I", 8) + text("gpt2"), text("tokenizer.ggml.tokens")]
    pairs[-1] += struct.pack("<IIQ", 9, 8, 1000)  # an array of 1,000 strings
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs)) + b"".join(pairs))
    os.truncate(path, num_bytes or path.stat().st_size)
    return path


def test_a_gguf_file_costs_what_its_shape_says(tmp_path):
    found = look(write_gguf(tmp_path / "model.gguf", num_bytes=WEIGHT_BYTES))
    assert (found.weight_bytes, found.kv_bytes_per_token, found.max_seq_len) == (WEIGHT_BYTES, KV_BYTES, 512)
    assert found.process_bytes == (40 << 20) + 640 * 1000


def test_a_file_of_fewer_bits_costs_what_it_takes_as_it_is(tmp_path):
    found = look(write_gguf(tmp_path / "model.gguf", num_bytes=WEIGHT_BYTES // 2))
    assert found.weight_bytes == int(1.15 * (WEIGHT_BYTES // 2))


def test_layers_with_a_state_cost_one_for_each_sequence_and_nothing_for_a_token(tmp_path):
    state = {"ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 4}
    shape = {**SHAPE, **state, "ssm.inner_size": 64, "full_attention_interval": 2, "attention.key_length": 16}
    found = look(write_gguf(tmp_path / "model.gguf", "qwen35", shape, WEIGHT_BYTES))
    assert found.kv_bytes_per_token == KV_BYTES // 2
    assert found.process_bytes == (40 << 20) + 640 * 1000 + 4 * 4 * (3 * 128 + 4 * 16 * 16)


def test_a_folder_costs_the_same(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(b"x" * WEIGHT_BYTES)
    found = look(tmp_path)
    assert (found.weight_bytes, found.kv_bytes_per_token, found.max_seq_len) == (WEIGHT_BYTES, KV_BYTES, 512)


def test_a_quantised_folder_costs_what_its_files_do(tmp_path):
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": awq}))
    (tmp_path / "model.safetensors").write_bytes(b"x" * (WEIGHT_BYTES // 2))
    assert look(tmp_path).weight_bytes == int(1.15 * (WEIGHT_BYTES // 2))


def test_without_a_shape_the_files_sizes_count(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"x" * 10)
    assert look(tmp_path).weight_bytes == 10


def test_an_unknown_architecture_is_refused_before_loading(tmp_path):
    with pytest.raises(Refused, match="architecture 'mamba' is not known") as caught:
        look(write_gguf(tmp_path / "model.gguf", "mamba"))
    assert caught.value.code is Code.NOSYS


def test_a_model_that_makes_embeddings_and_no_text_is_refused_before_loading(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "architectures": ["LlamaModel"]}))
    (tmp_path / "model.safetensors").write_bytes(b"x" * 10)
    with pytest.raises(Refused, match="LlamaModel makes embeddings, and a session answers with text") as caught:
        look(tmp_path)
    assert caught.value.code is Code.NOSYS


@pytest.mark.parametrize("keep", [3, 10, 40, 100])
def test_a_cut_file_is_no_model(keep, tmp_path):
    path = write_gguf(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(Refused, match=r"cut short|not a GGUF file") as caught:
        look(path)
    assert caught.value.code is Code.INVAL


def test_a_file_of_few_bits_takes_more_memory_than_it_has_bytes(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", num_bytes=WEIGHTS // 4)
    assert look(path).weight_bytes == int(0.55 * WEIGHT_BYTES)  # kept in up to 4.5 bits a weight


def test_a_model_without_keys_and_values_is_refused(tmp_path):
    shape = {"block_count": 2, "embedding_length": 64, "attention.head_count": 0, "feed_forward_length": 0}
    shape |= {"ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 1, "ssm.inner_size": 128}
    path = write_gguf(tmp_path / "m.gguf", "mamba2", {**shape, "ssm.time_step_rank": 4, "context_length": 1 << 20})
    with pytest.raises(Refused, match="mamba2 has no keys and values, which memory is counted in here") as caught:
        look(path)
    assert caught.value.code is Code.NOSYS
