"""Environment variables of the documented server (spec A.1): those with an effect here, and those without."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvloom.contract.errors import BadRequest
from kvloom.server.observe.logs import PYTHON_LEVELS, PythonLog

_SWITCHES = {"0": False, "1": True}
_BATCHING = ("MIES_CONTINUOUS_BATCHING", "AIE_LLM_CONTINUOUS_BATCHING")  # the first that is set counts
_IDLE = (
    *("ASCEND_", "ATB_", "ASDOPS_", "OCK_", "HCCL_", "TASK_QUEUE_", "INF_NAN_MODE_"),
    *("EP_OPENSSL_PATH", "HSECEASY_PATH", "INFER_ENGINE_TYPE"),
)


def environment_settings(environment: Mapping[str, str]) -> dict[str, Any]:
    """Settings from the environment, which override the file's. Raises BadRequest that names the variable."""
    settings: dict[str, Any] = {}
    batching = next((name for name in _BATCHING if name in environment), None)
    if batching is not None:
        settings["is_continuous"] = _switch(environment, batching)
    settings["python_log"] = _python_log(environment)
    return settings


def _python_log(environment: Mapping[str, str]) -> PythonLog:
    level = environment.get("MIES_PYTHON_LOG_LEVEL", "INFO")
    if level not in PYTHON_LEVELS:
        raise BadRequest("MIES_PYTHON_LOG_LEVEL", f"must be one of {', '.join(PYTHON_LEVELS)}, got {level!r}")
    path = None
    if _switch(environment, "MIES_PYTHON_LOG_TO_FILE"):
        path = Path(environment.get("MIES_PYTHON_LOG_PATH", "/workspace/log/pythonlog.log"))
    return PythonLog(level, path, _switch(environment, "MIES_PYTHON_LOG_TO_STDOUT"))


def idle_variables(environment: Mapping[str, str]) -> list[str]:
    """Variables that are set but only concern hardware that kvloom does not drive."""
    return sorted(name for name in environment if name.startswith(_IDLE))


def _switch(environment: Mapping[str, str], name: str) -> bool:
    value = environment.get(name, "0")
    if value not in _SWITCHES:
        raise BadRequest(name, f"must be 0 or 1, got {value!r}")
    return _SWITCHES[value]
