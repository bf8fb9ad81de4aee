"""Hugging Face folders: what is read, and what is refused with a sentence that gives the reason."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.contract.errors import ModelError
from tests.support.models.checkpoints import save, tiny_model


@pytest.fixture
def folder(tmp_path) -> Path:
    return save(tiny_model("llama"), tmp_path)


def edit_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def test_shards_are_found_through_the_index(folder):
    assert len(list(folder.glob("*.safetensors"))) > 1
    checkpoint = open_checkpoint(folder)
    assert checkpoint.spec.family == "llama"
    assert checkpoint.weights.tensor("layers.1.down").float32().shape == (64, 96)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_three_floating_types_are_read_exactly(tmp_path, dtype):
    model = tiny_model("llama").to(dtype)
    source = open_checkpoint(save(model, tmp_path)).weights
    for name, key in (("embed", "model.embed_tokens.weight"), ("layers.0.q", "model.layers.0.self_attn.q_proj.weight")):
        assert np.array_equal(source.tensor(name).float32(), model.state_dict()[key].float())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*LlamaForCausalLM"),
        ({"hidden_size": ...}, "hidden_size must be a positive whole number, got None"),
        ({"hidden_size": "big"}, "hidden_size must be a positive whole number"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"mlp_bias": True}, "mlp_bias is not supported"),
        ({"intermediate_size": 100}, r"tensor .* has shape \[96, 64\], the configuration asks for \[100, 64\]"),
        ({"num_hidden_layers": 3}, r"tensor model\.layers\.2\.\S+ is missing"),
        ({"rope_parameters": {"rope_type": "magic"}}, "rope scaling 'magic' is not known"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "rope scaling 'linear' lacks 'factor'"),
    ],
)
def test_a_configuration_that_cannot_be_served_is_named(folder, fields, words):
    edit_config(folder, **fields)
    with pytest.raises(ModelError, match=words):
        open_checkpoint(folder)


def test_pickles_are_never_opened(folder):
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/owned'\ntR.")
    with pytest.raises(ModelError, match="holds only pickle weights"):
        open_checkpoint(folder)


def test_an_empty_folder_a_missing_file_and_a_folder_without_config_are_named(tmp_path, folder):
    with pytest.raises(ModelError, match=r"config\.json: no such file"):
        open_checkpoint(tmp_path / "..")
    with pytest.raises(ModelError, match="no such file or folder"):
        open_checkpoint(tmp_path / "nowhere")
    next(folder.glob("*.safetensors")).unlink()
    with pytest.raises(ModelError, match=r"safetensors: no such file, though .* names it"):
        open_checkpoint(folder)


def test_a_config_that_is_no_json_is_named(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: cannot be read as JSON"):
        open_checkpoint(folder)


def test_a_file_cut_short_is_named(folder):
    path = sorted(folder.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=f"{path.name}: damaged or cut short"):
        open_checkpoint(folder)


def test_without_an_index_a_tensor_is_in_one_file(folder):
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    for path in list(folder.glob("*.safetensors")):
        path.rename(path.with_name(f"part-{path.name}"))
    first = min(folder.glob("*.safetensors"))
    (folder / "zz.safetensors").write_bytes(first.read_bytes())
    with pytest.raises(ModelError, match=rf"zz\.safetensors: tensor \S+ is in {first.name} too"):
        open_checkpoint(folder)


def test_variants_beside_model_safetensors_are_not_read(tmp_path):
    folder = save(tiny_model("llama"), tmp_path, max_shard_size="1GB")
    (folder / "model.fp16.safetensors").write_bytes(b"damaged")
    open_checkpoint(folder)


def test_a_tensor_of_integers_is_refused(tmp_path):
    folder = save(tiny_model("llama"), tmp_path, max_shard_size="1GB")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.norm\.weight is I32; known are F32, F16 and BF16"):
        open_checkpoint(folder)
