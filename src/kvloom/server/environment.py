"""Environment variables of the documented server (seed 001, A.1): those that mean something here, and the others."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvloom.engine.errors import BadRequest
from kvloom.server.logs import LEVELS

log = logging.getLogger(__name__)

_SWITCHES = {"0": False, "1": True}
_BATCHING = ("MIES_CONTINUOUS_BATCHING", "AIE_LLM_CONTINUOUS_BATCHING")  # the first that is set counts
_IDLE = ("ASCEND_", "ATB_", "ASDOPS_", "OCK_", "HCCL_", "TASK_QUEUE_", "INF_NAN_MODE_")


def environment_settings(environment: Mapping[str, str]) -> dict[str, Any]:
    """Settings that the environment gives, over those of the file. Raises BadRequest naming the variable."""
    settings: dict[str, Any] = {}
    batching = next((name for name in _BATCHING if name in environment), None)
    if batching is not None:
        settings["is_continuous"] = _switch(environment, batching)
    level = environment.get("MIES_PYTHON_LOG_LEVEL")
    if level is not None:
        if level not in LEVELS:
            raise BadRequest("MIES_PYTHON_LOG_LEVEL", f"must be one of {', '.join(LEVELS)}, got {level!r}")
        settings["log_level"] = level
    if "MIES_PYTHON_LOG_PATH" in environment and environment.get("MIES_PYTHON_LOG_TO_FILE", "1") == "1":
        settings["log_path"] = Path(environment["MIES_PYTHON_LOG_PATH"])
    if "MIES_PYTHON_LOG_TO_FILE" in environment and not _switch(environment, "MIES_PYTHON_LOG_TO_FILE"):
        settings["log_path"] = ""
    if "MIES_PYTHON_LOG_TO_STDOUT" in environment:
        settings["is_log_on_console"] = _switch(environment, "MIES_PYTHON_LOG_TO_STDOUT")
    return settings


def idle_variables(environment: Mapping[str, str]) -> list[str]:
    """Variables that are set and belong to hardware that is not driven here."""
    return sorted(name for name in environment if name.startswith(_IDLE))


def _switch(environment: Mapping[str, str], name: str) -> bool:
    value = environment[name]
    if value not in _SWITCHES:
        raise BadRequest(name, f"must be 0 or 1, got {value!r}")
    return _SWITCHES[value]
