"""The engine's part of a config.json, for programs that use the engine without the server."""

import logging
import os
from pathlib import Path

from kvloom.contract.config import EngineConfig
from kvloom.server.observe.logs import start_logging
from kvloom.server.run.launch import notes_of, read_settings, resolve_models
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
