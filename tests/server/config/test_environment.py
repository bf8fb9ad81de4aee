"""Environment variables of spec A.1: what they set, and which ones the log lists as without effect."""

from pathlib import Path

import pytest

from kvloom.contract.errors import BadRequest
from kvloom.server.config.environment import environment_settings, idle_variables
from kvloom.server.config.settings import Settings
from kvloom.server.observe.logs import LogConfig, PythonLog

IDLE = """
ASCEND_SLOG_PRINT_TO_STDOUT ASCEND_GLOBAL_LOG_LEVEL ASCEND_GLOBAL_EVENT_ENABLE ASCEND_RT_VISIBLE_DEVICES
ATB_STREAM_SYNC_EVERY_KERNEL_ENABLE ATB_STREAM_SYNC_EVERY_RUNNER_ENABLE ATB_STREAM_SYNC_EVERY_OPERATION_ENABLE
ATB_OPERATION_EXECUTE_ASYNC TASK_QUEUE_ENABLE ATB_OPSRUNNER_KERNEL_CACHE_LOCAL_COUNT
ATB_OPSRUNNER_KERNEL_CACHE_GLOABL_COUNT ATB_LOG_TO_FILE_FLUSH HCCL_BUFFSIZE ATB_LAYER_INTERNAL_TENSOR_REUSE
ASDOPS_LOG_TO_FILE ASDOPS_LOG_TO_STDOUT ASDOPS_LOG_LEVEL ASDOPS_MATMUL_PP_FLAG ASDOPS_LOG_TO_FILE_FLUSH
ASDOPS_LOG_TO_BOOST_TYPE ASDOPS_TILING_PARSE_CACHE_DISABLE OCK_LOG_LEVEL OCK_LOG_TO_STDOUT ATB_LOG_TO_FILE
ATB_LOG_TO_STDOUT ATB_LOG_LEVEL ATB_OPSRUNNER_SETUP_CACHE_ENABLE ATB_OPSRUNNER_KERNEL_CACHE_TYPE
ATB_OPSRUNNER_KERNEL_CACHE_TILING_SIZE ATB_PROFILING_ENABLE ATB_WORKSPACE_MEM_ALLOC_ALG_TYPE
ATB_WORKSPACE_MEM_ALLOC_GLOBAL ATB_COMPARE_TILING_EVERY_KERNEL ATB_HOST_TILING_BUFFER_BLOCK_NUM
ATB_DEVICE_TILING_BUFFER_BLOCK_NUM EP_OPENSSL_PATH HSECEASY_PATH INFER_ENGINE_TYPE
"""  # of spec A.1, and ASCEND_RT_VISIBLE_DEVICES


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


def log_of(given: dict[str, str]) -> LogConfig:
    file = {"models": [{"backend": "fake"}], "log_level": "Warning", "log_path": Path("/logs/y.log")}
    return Settings({**file, **environment_settings(given)}).build().log


def test_the_python_log_is_a_second_one_where_and_as_the_environment_says():
    given = {
        "MIES_PYTHON_LOG_TO_FILE": "1",
        "MIES_PYTHON_LOG_LEVEL": "ERROR",
        "MIES_PYTHON_LOG_PATH": "/somewhere/x.log",
    }
    assert log_of(given).python == PythonLog("ERROR", Path("/somewhere/x.log"))
    assert log_of({"MIES_PYTHON_LOG_TO_FILE": "1"}).python == PythonLog("INFO", Path("/workspace/log/pythonlog.log"))
    assert log_of({"MIES_PYTHON_LOG_TO_STDOUT": "1"}).python == PythonLog("INFO", None, is_on_stdout=True)


@pytest.mark.parametrize("switch", ["0", "1"])
def test_no_switch_of_the_python_log_touches_the_servers(switch):
    given = {"MIES_PYTHON_LOG_TO_FILE": switch, "MIES_PYTHON_LOG_TO_STDOUT": switch, "MIES_PYTHON_LOG_LEVEL": "FATAL"}
    log = log_of(given)
    assert (log.level, log.path, log.is_on_console) == ("Warning", Path("/logs/y.log"), True)


def test_by_default_there_is_no_python_log():
    assert log_of({"MIES_PYTHON_LOG_PATH": "/somewhere/x.log"}).python == PythonLog()


@pytest.mark.parametrize("name", ["MIES_CONTINUOUS_BATCHING", "MIES_PYTHON_LOG_TO_FILE", "MIES_PYTHON_LOG_LEVEL"])
def test_a_wrong_value_names_its_variable(name):
    with pytest.raises(BadRequest, match=f"{name}: must be"):
        environment_settings({name: "maybe"})


def test_variables_of_other_hardware_are_listed():
    given = {"PATH": "/bin", "ASCEND_GLOBAL_LOG_LEVEL": "3", "ATB_LOG_LEVEL": "ERROR", "INFER_ENGINE_TYPE": "x"}
    assert idle_variables(given) == ["ASCEND_GLOBAL_LOG_LEVEL", "ATB_LOG_LEVEL", "INFER_ENGINE_TYPE"]


@pytest.mark.parametrize("name", IDLE.split())
def test_every_variable_of_the_original_that_does_nothing_is_named(name):
    assert idle_variables({name: "1", "PATH": "/bin"}) == [name]
