"""A text-to-image model in a configuration: recognised by its files, with its own settings."""

import json
import os
from pathlib import Path

import pytest

from kvloom.contract.errors import BadRequest, ModelError
from kvloom.images import process
from kvloom.server.config.settings import Settings, load_settings
from kvloom.server.run.launch import resolve_models
from kvloom.server.run.preflight import problems
from tests.images.test_files import UNET, folder, weights


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests do not depend on the installed libraries."""
    monkeypatch.setattr(process, "_LIBRARIES", ())


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    path = tmp_path / "painter"
    path.mkdir()
    weights(path / "unet", "diffusion_pytorch_model.safetensors")
    return folder(path, unet=UNET)


def written(tmp_path: Path, pipeline: Path, **model: object) -> Path:
    models = [{"modelName": "mock", "modelInstanceType": "StandardMock"}]
    models.append({"modelName": "sd", "modelWeightPath": str(pipeline), **model})
    path = tmp_path / "config.json"
    backend = {"ModelDeployConfig": {"ModelConfig": models}, "ScheduleConfig": {"numSpeculativeTokens": 4}}
    document = {"ServerConfig": {"e2eTimeout": 90}, "BackendConfig": backend}
    path.write_text(json.dumps(document))
    path.chmod(0o640)
    return path


def settings_of(path: Path) -> Settings:
    settings = Settings(load_settings(path))
    resolve_models(settings)
    return settings


def test_it_stands_beside_language_models(tmp_path: Path, pipeline: Path):
    neutral = {"toolParser": "auto", "loraModules": [], "weightFormat": "auto"}
    path = written(tmp_path, pipeline, imageSteps=4, imageGuidance=0.0, maxImagePixels=65536, **neutral)
    config = settings_of(path).build()
    assert [card.name for card in config.models] == ["mock"]
    [card] = config.pictures
    assert (card.name, card.path, card.steps, card.guidance) == ("sd", str(pipeline), 4, 0.0)
    assert (card.max_pixels, card.time_limit_s, card.device) == (65536, 90, "cpu")
    assert config.names == ["mock", "sd"]
    assert list(problems(Settings(load_settings(path)))) == []


def test_it_may_stand_alone(pipeline: Path):
    settings = Settings()
    settings.override_model(model=str(pipeline))
    resolve_models(settings)
    config = settings.build()
    assert (config.models, config.names) == ((), ["painter"])


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"worldSize": 2}, "worldSize: must be 1 for sd, which makes pictures, got 2"),
        ({"loraModules": ["a=b"]}, "loraModules: is of language models; sd makes pictures"),
        ({"toolParser": "hermes"}, "toolParser: is of language models; sd makes pictures"),
        ({"draftModel": "d"}, "draftModel: is of language models; sd makes pictures"),
        ({"modelName": "mock"}, "modelName: must differ from model to model, got mock, mock"),
    ],
)
def test_what_it_cannot_have_is_refused(tmp_path: Path, pipeline: Path, model: dict[str, object], words: str):
    with pytest.raises(BadRequest) as caught:
        settings_of(written(tmp_path, pipeline, **model)).build()
    assert str(caught.value) == words


def test_what_a_language_model_cannot_have_is_refused(tmp_path: Path, pipeline: Path):
    settings = settings_of(written(tmp_path, pipeline))
    settings.models[0]["image_steps"] = 3
    with pytest.raises(BadRequest, match="imageSteps: is of text-to-image models"):
        settings.build()


def test_its_devices_are_those_of_its_number(tmp_path: Path, pipeline: Path):
    settings = settings_of(written(tmp_path, pipeline, deviceType="cuda"))
    settings.values["device_ids"] = [[0], [3]]
    settings.models[0]["device"] = "cuda"
    assert settings.build().pictures[0].device == "cuda:3"


def test_on_a_cpu_its_device_is_a_share_of_the_cores(tmp_path: Path, pipeline: Path):
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core cannot be shared")
    settings = settings_of(written(tmp_path, pipeline))
    settings.values["device_ids"] = [[0], [1]]
    [card] = settings.build().pictures
    assert (card.device, card.cores) == ("cpu", tuple(cores[len(cores) // 2 :]))
    settings.values["device_ids"] = [[0]]
    assert settings.build().pictures[0].cores == ()


@pytest.mark.parametrize(("pair", "got"), [("sd", '"sd"'), ("=x", '"=x"'), ("sd=", '"sd="')])
def test_the_option_takes_pairs(pair: str, got: str):
    with pytest.raises(BadRequest, match=f"image-model: must be NAME=FOLDER, got {got}"):
        Settings().add_models([pair])


def test_check_finds_a_pipeline_that_is_not_known(tmp_path: Path, pipeline: Path):
    folder(pipeline, "AudioLDMPipeline")
    [problem] = problems(Settings(load_settings(written(tmp_path, pipeline))))
    assert isinstance(problem, ModelError)
    assert "AudioLDMPipeline of diffusers is not known; this server has" in str(problem)
