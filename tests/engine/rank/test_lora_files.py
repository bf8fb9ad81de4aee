"""Files of LoRA adapters: fields, names and shapes that are refused, and those that are passed over."""

import json
import os
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.checkpoints.lora import read_adapter
from kvloom.checkpoints.lora_tensors import lora_shapes, pairs_of
from kvloom.contract.errors import BadRequest
from tests.support.models.adapters import TINY_SHAPES, adapted, make_adapter
from tests.support.models.checkpoints import save, tiny_model

NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "IA3"}, "adapter_config.json: peft_type must be \"LORA\", got 'IA3'"),
        ({"r": 0}, "r must be a whole number from 1 to 512, got 0"),
        ({"r": 513}, "r must be a whole number from 1 to 512, got 513"),
        ({"r": 5}, "q_proj.lora_A.weight has shape [4, 8]; rank and base model ask for [5, 8]"),
        ({"rank_pattern": {"v_proj": 3}}, "v_proj.lora_A.weight has shape [4, 8]"),
        ({"rank_pattern": {"(": 3}}, "rank_pattern has '(', which is no regular expression"),
        ({"rank_pattern": {"(" * 9999 + ")" * 9999: 3}}, "which is no regular expression: maximum recursion depth"),
        ({"rank_pattern": {"([a-z_.0-9]+)*X": 4}}, "with a repeated group, or more than 3 groups and repetitions"),
        ({"rank_pattern": {"(.|.)" * 30 + "X": 4}}, "which could take for ever"),
        ({"rank_pattern": {".*" * 20 + "X": 4}}, "which could take for ever"),
        ({"alpha_pattern": {f".*.*.*{i}": 4 for i in range(22)}}, "66 groups and repetitions, more than 64"),
        ({"rank_pattern": {f"x{i}": 4 for i in range(8193)}}, "rank_pattern has 8193 patterns, more than 8192"),
        ({"lora_alpha": 10**399}, "lora_alpha must be a number, got 1000"),
        ({"alpha_pattern": {"q_proj": 10**399}}, "alpha_pattern must be a number, got 1000"),
        ({"bias": "x" * 100_000}, "bias is not supported, got 'xxx"),
        ({"use_rslora": "false"}, "use_rslora must be true or false, got 'false'"),
        ({"lora_alpha": "x"}, "lora_alpha must be a number, got 'x'"),
        ({"bias": "all"}, "bias is not supported, got 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported, got ['lm_head']"),
        ({"use_dora": True}, "use_dora is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4' changes the base model"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights 'loftq' changes the base model"),
        ({"init_lora_weights": "of_2027"}, "init_lora_weights is not supported, got 'of_2027'"),
        ({"kasa_config": {"beta": 1e-4}}, "kasa_config is not supported, got {'beta': 0.0001}"),
        ({"use_qalora": True}, "use_qalora is not supported, got True"),
        ({"field_of_2027": 1}, "field_of_2027 is not supported, got 1"),
        ({"target_modules": ["q_proj", "lm_head"]}, "target_modules 'lm_head' is not supported; supported are q_proj"),
    ],
)
def test_a_configuration_that_cannot_be_followed_is_refused_by_name(tmp_path, config, words):
    make_adapter(tmp_path, TINY_SHAPES)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    with pytest.raises(BadRequest) as caught:
        read_adapter(tmp_path, TINY_SHAPES)
    assert words in str(caught.value)
    assert caught.value.field == "lora_path"


PEFT = json.loads(
    """{
    "alora_invocation_tokens": null, "alpha_pattern": {}, "arrow_config": null, "auto_mapping": null,
    "base_model_name_or_path": null, "bias": "none", "corda_config": null, "ensure_weight_tying": false,
    "eva_config": null, "exclude_modules": null, "fan_in_fan_out": false, "inference_mode": false,
    "init_lora_weights": true, "kasa_config": null, "layer_replication": null, "layers_pattern": null,
    "layers_to_transform": null, "loftq_config": {}, "lora_alpha": 8, "lora_bias": false, "lora_dropout": 0.0,
    "lora_ga_config": null, "megatron_config": null, "megatron_core": "megatron.core", "modules_to_save": null,
    "monteclora_config": null, "peft_type": "LORA", "peft_version": "0.21.2", "qalora_group_size": 16, "r": 4,
    "rank_pattern": {}, "revision": null, "target_modules": ["q_proj"], "target_parameters": null,
    "task_type": "CAUSAL_LM", "trainable_token_indices": null, "use_bdlora": null, "use_dora": false,
    "use_qalora": false, "use_rslora": false, "velora_config": null}"""
)  # what peft 0.21.2 writes for LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")


@pytest.mark.parametrize(
    "own",
    [
        {},
        {"inference_mode": True, "revision": "main", "lora_dropout": 0.1, "layers_to_transform": [0]},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}, "exclude_modules": ["lm_head"]},
        {"init_lora_weights": False, "runtime_config": {"ephemeral_gpu_offload": False}, "field_of_2027": False},
    ],
)
def test_fields_that_change_nothing_are_passed_over(tmp_path, own):
    make_adapter(tmp_path, TINY_SHAPES)
    (tmp_path / "adapter_config.json").write_text(json.dumps({**PEFT, **own}))
    assert read_adapter(tmp_path, TINY_SHAPES).modules["layers.0.q"].scale == 2.0


def of_gemma3(folder, text, picture):
    """An adapter of a model that sees as peft names its tensors: `text` before layers, and one of the vision part."""
    make_adapter(folder, TINY_SHAPES, target_modules=["q_proj", "v_proj", "fc1"])
    path = folder / "adapter_model.safetensors"
    tensors = {key.replace("model.layers", f"{text}layers"): value for key, value in load_file(path).items()}
    tensors |= {f"base_model.model.{picture}.lora_{side}.weight": torch.ones(4, 4) for side in "AB"}
    save_file(tensors, path)
    return folder


@pytest.mark.parametrize(
    ("text", "picture"),
    [
        ("model.language_model.", "model.vision_tower.encoder.layers.0.mlp.fc1"),
        ("language_model.model.", "vision_tower.vision_model.encoder.layers.0.mlp.fc1"),
    ],
)
def test_the_text_part_of_an_adapter_of_a_model_that_sees_is_read(tmp_path, text, picture):
    """As transformers 5.24 and 4.50 name the modules of Gemma3ForConditionalGeneration."""
    assert set(read_adapter(of_gemma3(tmp_path, text, picture), TINY_SHAPES).modules) == set(TINY_SHAPES)


def test_tensors_of_pictures_are_refused_beside_those_of_a_model_without(tmp_path):
    folder = of_gemma3(tmp_path, "model.", "model.vision_tower.encoder.layers.0.mlp.fc1")
    with pytest.raises(BadRequest, match="target_modules 'fc1' is not supported"):
        read_adapter(folder, TINY_SHAPES)


def test_a_linear_under_two_names_is_refused(tmp_path):
    path = of_gemma3(tmp_path, "model.language_model.", "model.vision_tower.x") / "adapter_model.safetensors"
    tensors = load_file(path)
    again = {key.replace("model.language_model", "language_model.model"): own.clone() for key, own in tensors.items()}
    save_file(tensors | again, path)
    with pytest.raises(BadRequest, match="is of a linear that another tensor names otherwise"):
        read_adapter(tmp_path, TINY_SHAPES)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(NAME), "q_proj.lora_B.weight has no partner"),
        (lambda t: t.update({NAME.replace("q_proj", "x_proj"): t.pop(NAME)}), "x_proj.lora_A.weight is none of lora_A"),
        (lambda t: t.update({"lm_head.weight": torch.ones(2, 2)}), "lm_head.weight is none of lora_A"),
        (lambda t: t.update({NAME: torch.ones(4, 9)}), "has shape [4, 9]; rank and base model ask for [4, 8]"),
        (lambda t: t.update({NAME: torch.ones(4)}), "has shape [4], not two dimensions"),
        (lambda t: t.update({NAME: torch.ones(4, 8, dtype=torch.int32)}), "has type I32; supported are F32, F16, BF16"),
        (lambda t: t.update({k.replace("layers.0", "layers.7"): t.pop(k) for k in list(t)}), "does not have"),
        (lambda t: t.clear(), "holds no tensor"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path, change, words):
    path = make_adapter(tmp_path, TINY_SHAPES) / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(BadRequest) as caught:
        read_adapter(tmp_path, TINY_SHAPES)
    assert words in str(caught.value)


def test_missing_and_damaged_files_are_refused(tmp_path):
    with pytest.raises(BadRequest, match=r"lora_path: adapter_config.json cannot be read: No such file"):
        read_adapter(tmp_path / "nowhere", None)
    path = make_adapter(tmp_path / "a", TINY_SHAPES) / "adapter_model.safetensors"
    whole = path.read_bytes()
    for cut in range(0, len(whole), 17):
        path.write_bytes(whole[:cut])
        with pytest.raises(BadRequest, match=r"lora_path: adapter_model.safetensors"):
            read_adapter(path.parent, None)
    path.write_bytes(whole + b"x")
    with pytest.raises(BadRequest, match="larger than"):
        read_adapter(path.parent, None)
    path.write_bytes(whole)
    config = path.parent / "adapter_config.json"
    config.write_text("[]")
    with pytest.raises(BadRequest, match="holds no JSON object"):
        read_adapter(path.parent, None)
    config.unlink()
    os.mkfifo(config)
    with pytest.raises(BadRequest, match=r"adapter_config.json cannot be read: it is a pipe to which nobody writes"):
        read_adapter(path.parent, None)


def test_the_digest_is_of_the_contents_and_not_of_the_path(tmp_path):
    one = make_adapter(tmp_path / "one", TINY_SHAPES, 1)
    digest = read_adapter(one, None).digest
    assert read_adapter(shutil.copytree(one, tmp_path / "copy"), None).digest == digest
    assert read_adapter(make_adapter(tmp_path / "two", TINY_SHAPES, 2), None).digest != digest
    assert read_adapter(make_adapter(tmp_path / "three", TINY_SHAPES, 1, lora_alpha=3), None).digest != digest


@pytest.mark.parametrize(
    "name",
    [
        "qwen3.5",
        "qwen3 next, a dense layer",
        "lfm2",
        "granite 4, dense, rotated",
        "nemotron h",
        "mamba2",
        "kimi linear",
    ],
)
def test_all_linears_of_layers_with_states_are_found_by_the_names_of_peft(tmp_path, name):
    """Each tensor of the merged model is the one of the model and the pair's product."""
    model = tiny_model(name)
    merged = adapted(model, tmp_path / "adapter")
    sources = [open_checkpoint(save(each, tmp_path / str(i))) for i, each in enumerate((model, merged))]
    spec = sources[0].spec
    pairs = dict(pairs_of(read_adapter(tmp_path / "adapter", lora_shapes(spec)), spec))
    for tensor, shape in spec.tensor_shapes().items():
        before, after = (source.weights.tensor(tensor).float32() for source in sources)
        pair = pairs.pop(tensor, None)
        added = pair.scale * pair.b @ pair.a if pair else np.zeros(shape, np.float32)
        assert np.allclose(after, before + added, atol=1e-5), tensor
    assert not pairs
