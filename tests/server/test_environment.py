"""Environment variables of seed 001, A.1: what they set, and which are named as without effect."""

from pathlib import Path

import pytest

from kvloom.engine.errors import BadRequest
from kvloom.server.config import Settings
from kvloom.server.environment import environment_settings, idle_variables


@pytest.mark.parametrize(
    ("environment", "is_continuous"),
    [
        ({}, True),
        ({"MIES_CONTINUOUS_BATCHING": "0"}, False),
        ({"AIE_LLM_CONTINUOUS_BATCHING": "0"}, False),
        ({"MIES_CONTINUOUS_BATCHING": "1", "AIE_LLM_CONTINUOUS_BATCHING": "0"}, True),
    ],
)
def test_continuous_batching_by_either_name(environment, is_continuous):
    settings = Settings({"models": [{"backend": "fake"}], **environment_settings(environment)})
    assert settings.build().models[0].engine.is_continuous is is_continuous


def test_the_log_is_where_and_as_the_environment_says():
    given = {
        "MIES_PYTHON_LOG_LEVEL": "ERROR",
        "MIES_PYTHON_LOG_PATH": "/somewhere/x.log",
        "MIES_PYTHON_LOG_TO_STDOUT": "0",
    }
    file = {"models": [{"backend": "fake"}], "log_level": "Info", "log_path": Path("/logs/y.log")}
    log = Settings({**file, **environment_settings(given)}).build().log
    assert (log.level, log.path, log.is_on_console) == ("ERROR", Path("/somewhere/x.log"), False)
    off = Settings({**file, **environment_settings({"MIES_PYTHON_LOG_TO_FILE": "0"})}).build().log
    assert off.path is None


@pytest.mark.parametrize("name", ["MIES_CONTINUOUS_BATCHING", "MIES_PYTHON_LOG_TO_FILE", "MIES_PYTHON_LOG_LEVEL"])
def test_a_wrong_value_names_its_variable(name):
    with pytest.raises(BadRequest, match=f"{name}: must be"):
        environment_settings({name: "maybe"})


def test_variables_of_other_hardware_are_listed():
    given = {"PATH": "/bin", "ASCEND_GLOBAL_LOG_LEVEL": "3", "ATB_LOG_LEVEL": "ERROR", "MIES_PYTHON_LOG_LEVEL": "INFO"}
    assert idle_variables(given) == ["ASCEND_GLOBAL_LOG_LEVEL", "ATB_LOG_LEVEL"]
