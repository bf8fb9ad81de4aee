"""From a config.json, the environment and flags to a running server: what `kvloom serve` and the daemon share."""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from kvloom.engine.hub import MODELS, find_model, pull
from kvloom.server.config import Settings, load_settings
from kvloom.server.environment import environment_settings, idle_variables
from kvloom.server.logs import start_logging
from kvloom.server.main import serve

log = logging.getLogger(__name__)

DEMO_MODEL = "smollm2"


def read_settings(config: Path | None, environment: Mapping[str, str]) -> Settings:
    """Of the file, then of the environment. Raises BadRequest, AccessError."""
    settings = Settings(load_settings(config) if config else {})
    settings.override(**environment_settings(environment))
    return settings


def launch(settings: Settings) -> None:
    """Find or fetch the models and serve until a signal. Raises ServingError, TlsError, AccessError."""
    resolve_models(settings)
    config = settings.build()
    start_logging(config.log)
    idle = idle_variables(os.environ)
    if idle:
        log.info("environment without effect here: %s", ", ".join(idle))
    serve(config)


def resolve_models(settings: Settings) -> None:
    """Each model's name becomes a path, "" for a mock; the demo model is fetched when nothing is named."""
    for model in settings.models:
        if model.get("instance_type") == "StandardMock" or model.get("backend") == "fake":
            model.update(backend="fake", model="")
            continue
        name = model.get("model") or DEMO_MODEL
        if name in MODELS:
            model.setdefault("name", name)
        path = find_model(name) if model.get("model") else fetch(name)
        model.update(model=str(path), torch_dtype=_dtype_of(path))


def _dtype_of(path: Path) -> str:
    """The type of the weights as the checkpoint names it."""
    try:
        found = json.loads((path / "config.json").read_text(encoding="utf-8")).get("torch_dtype")
    except (OSError, ValueError, AttributeError):
        return path.suffix.lstrip(".") or "auto"
    return f"torch.{found}" if found else "auto"


def fetch(name: str) -> Path:
    """A demo model, from the network unless it is in the user's cache. Raises ModelError."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"fetching {name}", total=None)
        return pull(name, lambda done, total: bar.update(task, completed=done, total=total))
