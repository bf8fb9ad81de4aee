"""The engine's part of a config.json, for programs that use the engine without the server."""

import os
from pathlib import Path

from kvloom.engine.config import EngineConfig
from kvloom.server.launch import read_settings, resolve_models


def read_engine_config(path: Path) -> EngineConfig:
    """Of the file's first model, the environment over it, with the model's path resolved. Raises ServingError."""
    settings = read_settings(path, os.environ)
    resolve_models(settings)
    return settings.build().models[0].engine
