"""Which folders are text-to-image models that this server supports; diffusers is not needed to tell."""

import json
from pathlib import Path

import pytest

from kvloom.contract.errors import ModelError
from kvloom.images import process
from kvloom.images.files import check_pipeline, is_pipeline, variant_of

UNET = ["diffusers", "UNet2DConditionModel"]


def folder(path: Path, kind: object = "StableDiffusionPipeline", **parts: object) -> Path:
    (path / "model_index.json").write_text(json.dumps({"_class_name": kind, "_diffusers_version": "0.42.1", **parts}))
    return path


def weights(path: Path, *names: str) -> None:
    path.mkdir()
    for name in names:
        (path / name).write_bytes(b"")


def test_a_folder_with_an_index_of_parts_is_one(tmp_path: Path):
    assert not is_pipeline(tmp_path)
    weights(tmp_path / "unet", "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin")
    path = folder(tmp_path, unet=UNET, safety_checker=[None, None], requires_safety_checker=False)
    assert is_pipeline(path)
    assert check_pipeline(path) == "StableDiffusionPipeline"
    assert variant_of(path) is None


def test_weights_of_half_the_size_alone_are_found(tmp_path: Path):
    weights(tmp_path / "unet", "diffusion_pytorch_model.fp16.safetensors")
    assert variant_of(folder(tmp_path, unet=UNET)) == "fp16"


@pytest.mark.parametrize("kind", ["AudioLDMPipeline", ["pipeline", "MyPipeline"], None])
def test_another_pipeline_is_refused_in_one_sentence(tmp_path: Path, kind: object):
    with pytest.raises(
        ModelError, match=r"of diffusers is not known; this server has StableDiffusionPipeline, .*FluxPipeline$"
    ):
        check_pipeline(folder(tmp_path, kind))


@pytest.mark.parametrize("part", [["mycode", "Net"], ["diffusers", "os.system"], ["diffusers", None], [None, "Net"]])
def test_code_of_a_folder_is_never_run(tmp_path: Path, part: list[object]):
    weights(tmp_path / "unet", "model.safetensors")
    with pytest.raises(ModelError, match="only parts of diffusers and transformers load"):
        check_pipeline(folder(tmp_path, unet=part))


@pytest.mark.parametrize("name", ["../unet", "a/b", "un.et"])
def test_a_part_lies_in_the_folder(tmp_path: Path, name: str):
    with pytest.raises(ModelError, match="must name a library and a class"):
        check_pipeline(folder(tmp_path, **{name: UNET}))


@pytest.mark.parametrize("file", ["diffusion_pytorch_model.bin", "model.ckpt", "weights.pt"])
def test_pickles_are_refused(tmp_path: Path, file: str):
    weights(tmp_path / "unet", "config.json", file)
    with pytest.raises(ModelError, match=f"unet/{file} is a pickle, which may run code; only .safetensors is read"):
        check_pipeline(folder(tmp_path, unet=UNET))


@pytest.mark.parametrize("file", ["evil.bin", "../vae/model.safetensors", "/tmp/model.safetensors", 7])
def test_an_index_of_shards_leads_to_safetensors_of_its_folder_alone(tmp_path: Path, file: object):
    weights(tmp_path / "unet", "model-00001-of-00002.safetensors", "evil.bin")
    index = tmp_path / "unet" / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    assert check_pipeline(folder(tmp_path, unet=UNET)) == "StableDiffusionPipeline"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": file}}))
    with pytest.raises(ModelError, match=r"index.json: names .*; only .safetensors files of its folder are read"):
        check_pipeline(tmp_path)


def test_a_missing_part_is_named(tmp_path: Path):
    with pytest.raises(ModelError, match=r"unet is missing; model_index.json names it"):
        check_pipeline(folder(tmp_path, unet=UNET))


def test_without_diffusers_one_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "_LIBRARIES", ("json", "kvloom_is_not_installed"))
    with pytest.raises(ModelError, match=r"which takes kvloom_is_not_installed: pip install 'kvloom\[images\]'"):
        process.check(folder(tmp_path))
