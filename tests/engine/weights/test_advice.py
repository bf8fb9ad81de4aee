"""The sampling parameters that a model's files recommend."""

import json
import struct

import pytest

from kvloom.checkpoints.advice import sampling_advice


def folder(path, **values):
    (path / "model.safetensors").write_bytes(b"")
    (path / "generation_config.json").write_text(json.dumps(values))
    return str(path)


def gguf(path, **values):
    """Writes a GGUF file that has only these sampling keys, as 32-bit numbers."""
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, len(values))
    for key, value in values.items():
        name = f"general.sampling.{key}".encode()
        kind, form = (6, "<If") if isinstance(value, float) else (5, "<Ii")
        data += struct.pack("<Q", len(name)) + name + struct.pack(form, kind, value)
    path.write_bytes(data)
    return str(path)


def test_a_folder_says_it_in_generation_config(tmp_path):
    values = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True, "eos_token_id": 2}
    assert sampling_advice(folder(tmp_path, **values)) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


def test_a_gguf_file_says_it_in_its_metadata(tmp_path):
    path = gguf(tmp_path / "m.gguf", temp=0.7, top_k=40, top_p=0.8, min_p=0.05, penalty_repeat=1.05, mirostat=0)
    advice = {"temperature": 0.7, "top_k": 40, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.05}
    assert sampling_advice(path) == advice
    assert sampling_advice(str(tmp_path)) == advice  # a folder with one such file


def test_transformers_minus_one_is_off(tmp_path):
    assert sampling_advice(folder(tmp_path, top_k=-1)) == {"top_k": 0}


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": "hot"}, {"temperature": -1}, {"temperature": float("nan")}, {"temperature": 1e9},
        {"temperature": True}, {"top_p": 0}, {"top_p": 1.5}, {"top_k": 0.5}, {"top_k": -2}, {"top_k": 10**400},
        {"repetition_penalty": 0}, {"repetition_penalty": [1.1]}, {"min_p": {}},
    ],
)  # fmt: skip
def test_what_no_request_could_have_is_left_out_and_told(values, tmp_path, caplog):
    rest = {} if "temperature" in values else {"temperature": 0.5}
    assert sampling_advice(folder(tmp_path, **rest, **values)) == rest
    (told,) = caplog.messages
    assert f"left out: {next(iter(values))}" in told


@pytest.mark.parametrize("text", ["", "[]", "{", '{"temperature": 1e999}'])
def test_a_file_that_cannot_be_read_advises_nothing(text, tmp_path, caplog):
    path = folder(tmp_path)
    (tmp_path / "generation_config.json").write_text(text)
    assert sampling_advice(path) == {}
    assert len(caplog.records) == 1


@pytest.mark.parametrize("model", ["", "nobody/has-it", "/dev/null"])
def test_what_is_no_model_of_files_advises_nothing(model):
    assert sampling_advice(model) == {}
