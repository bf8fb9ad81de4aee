"""From a config.json, the environment and flags to a running server: what `kvloom serve` and the daemon share."""

import logging
import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from kvloom.checkpoints.demo_models import MODELS, find_model, pull, pulled
from kvloom.checkpoints.embedding.prompts import message_form, prompts_of
from kvloom.checkpoints.files import read_object
from kvloom.checkpoints.finding import find_weights, is_assistant
from kvloom.contract.config import MTP, EngineConfig
from kvloom.contract.errors import ModelError
from kvloom.images.files import is_pipeline
from kvloom.images.process import check
from kvloom.server.config.devices import devices_note
from kvloom.server.config.environment import environment_settings, idle_variables
from kvloom.server.config.settings import Settings, load_settings
from kvloom.server.observe.logs import start_logging
from kvloom.server.run.main import serve
from kvloom.server.serving.card import ModelCard

log = logging.getLogger(__name__)


def read_engine_config(path: Path, logs: bool = False) -> EngineConfig:
    """The EngineConfig of read_model_card."""
    return read_model_card(path, logs).engine


def read_model_card(path: Path, logs: bool = False) -> ModelCard:
    """The file's first model, overridden by the environment, with the model's path resolved.

    Raises ServingError. With `logs` this process's log is opened, in the files that configuration and environment name.
    """
    settings = read_settings(path, os.environ)
    settings.override(is_log_on_console=False)
    resolve_models(settings)
    config = settings.build()
    if logs:
        start_logging(config.log)
        for note in notes_of(settings, os.environ):
            log.warning("%s", note)
    return config.models[0]


log = logging.getLogger(__name__)

DEMO_MODEL = "smollm2"


def read_settings(config: Path | None, environment: Mapping[str, str]) -> Settings:
    """Settings of the file, overridden by the environment. Raises BadRequest, AccessError."""
    settings = Settings(load_settings(config) if config else {})
    settings.override(**environment_settings(environment))
    return settings


def launch(settings: Settings) -> None:
    """Find or fetch the models and serve until a signal. Raises ServingError, TlsError, AccessError."""
    resolve_models(settings)
    config = settings.build()
    start_logging(config.log)
    for note in notes_of(settings, os.environ):  # only now, because the log was not open before
        log.warning("%s", note)
    serve(config)


def notes_of(settings: Settings, environment: Mapping[str, str]) -> list[str]:
    """Settings of the file and the environment without effect, one sentence each."""
    idle = idle_variables(environment)
    notes = list(settings.values.get("notes", ()))
    if devices := settings.values.get("device_ids"):
        notes += filter(None, [devices_note(devices, settings.models[0].get("device", "cpu").partition(":")[0])])
    if idle:
        notes.append(f"environment: without effect here: {', '.join(idle)}")
    return notes


def resolve_models(settings: Settings) -> None:
    """Replace each model's name by its path, "" for a mock; fetch the demo model if no model is named."""
    for model in settings.models:
        resolve_model(model)


def resolve_model(model: dict[str, Any], may_fetch: bool = True) -> None:
    """Replace the model's name in its settings by a path. A demo model that is not here is fetched if `may_fetch`,
    otherwise the error tells how to fetch it.

    Raises ModelError.
    """
    if model.get("instance_type") == "StandardMock" or model.get("backend") == "fake":
        model.update(backend="fake", model="")
        return
    if not model.get("model"):
        model["model"] = DEMO_MODEL
    name = model["model"]
    if name in MODELS:
        model.setdefault("name", name)
    if is_pipeline(folder := Path(os.path.expanduser(name))):
        check(folder)
        model.update(model=str(folder), makes_pictures=True)
        return
    path = _path_of(name, may_fetch)
    if (draft := model.get("draft_model", "")) not in ("", MTP):
        model["draft_model"] = str(_draft_path(draft, may_fetch))
    texts = {"prompts": prompts_of(path), "message_form": message_form(path)}
    model.update(model=str(path), torch_dtype=_dtype_of(path), **texts)


def _path_of(name: str, may_fetch: bool) -> Path:
    path = fetch(name) if name in MODELS and may_fetch else find_weights(find_model(name))
    check_files(path)
    return path


def _draft_path(name: str, may_fetch: bool) -> Path:
    try:
        return _path_of(name, may_fetch)
    except ModelError as error:
        raise ModelError(f"draftModel: {error}") from None


def check_files(path: Path) -> None:
    """Raises ModelError when a folder lacks files that every model has; their contents are read later."""
    if path.is_dir() and not any(path.glob("*.safetensors")):
        raise ModelError(f"{path} holds no model: neither .safetensors nor .gguf files are in it")
    for name in ("config.json", "tokenizer.json"):
        is_spared = name == "tokenizer.json" and path.is_dir() and is_assistant(path)
        if path.is_dir() and not (path / name).is_file() and not is_spared:
            raise ModelError(f"{path} holds no {name}, which a model needs beside its weights")


def _dtype_of(path: Path) -> str:
    """The data type of the weights as named in the checkpoint."""
    try:
        found = read_object(path / "config.json").get("torch_dtype")
    except ModelError:
        return path.suffix.lstrip(".") or "auto"
    return f"torch.{found}" if found else "auto"


def fetch(name: str) -> Path:
    """Path of a demo model, downloaded unless it is in the user's cache. Raises ModelError."""
    found = pulled(name)
    if found is not None:
        return found
    with cast(Any, import_module("kvloom.client.bars")).bar(f"fetching {name}") as progress:
        return pull(name, progress)
