"""The logs of a running daemon: which files, which level, and whose lines each file has."""

import contextlib
import json
import logging
import os
import re
import signal
from pathlib import Path

import httpx
import pytest

from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import BadRequest
from kvloom.engine.link.rankargs import RankArguments, parse
from kvloom.processes import childlog
from kvloom.rank.fake import ByteTokenizer
from kvloom.rank.opening import open_engine
from kvloom.server.observe import logs
from kvloom.server.observe.logs import LogConfig
from tests.server.run.test_daemon import DAEMON, generate, install
from tests.support.ports import free_port
from tests.support.processes import ServeProcess, serving
from tests.support.waiting import until

SET_ENV = """
MIES_CONTINUOUS_BATCHING=1 ATB_OPERATION_EXECUTE_ASYNC=1 TASK_QUEUE_ENABLE=1 HCCL_BUFFSIZE=120
ASCEND_SLOG_PRINT_TO_STDOUT=0 ASCEND_GLOBAL_LOG_LEVEL=3 ASCEND_GLOBAL_EVENT_ENABLE=0 ATB_LOG_TO_FILE=0
ATB_LOG_TO_FILE_FLUSH=0 ATB_LOG_TO_STDOUT=0 ATB_LOG_LEVEL=ERROR ASDOPS_LOG_TO_FILE=0 ASDOPS_LOG_TO_STDOUT=0
ASDOPS_LOG_LEVEL=ERROR OCK_LOG_LEVEL=ERROR OCK_LOG_TO_STDOUT=0 MIES_PYTHON_LOG_TO_FILE=0
MIES_PYTHON_LOG_TO_STDOUT=0 MIES_PYTHON_LOG_PATH=/workspace/log/pythonlog.log MIES_PYTHON_LOG_LEVEL=INFO
EP_OPENSSL_PATH=/lib HSECEASY_PATH=/lib INFER_ENGINE_TYPE=RUNTIME_ENGINE
"""  # spec A.1, the sample set_env.sh


def written(folder: Path) -> str:
    return (folder / "logs" / "mindservice.log").read_text()


def generated(daemon: ServeProcess, folder: Path) -> str:
    """The text of the log once a request has been answered and logged."""
    generate(daemon.url, "llama_65b")
    until(lambda: "COMPLETED REQ ID" in written(folder))
    return written(folder)


def test_the_sample_environment_leaves_the_servers_log(tmp_path):
    given = dict(pair.split("=", 1) for pair in SET_ENV.split())
    with serving([*DAEMON, "--config", str(install(tmp_path))], **given) as daemon:
        log = generated(daemon, tmp_path)
    idle = [line for line in log.splitlines() if "environment: without effect here" in line]
    assert len(idle) == 1
    for name in given:
        assert (name in idle[0]) is not name.startswith("MIES_"), name
    assert re.search(r"npuBlockNum: \d+", log)


def test_a_disk_that_is_full_is_told_once(tmp_path):
    config = install(tmp_path)
    (tmp_path / "logs").mkdir(exist_ok=True)
    (tmp_path / "logs" / "mindservice.log").symlink_to("/dev/full")
    with serving([*DAEMON, "--config", str(config)]) as daemon:
        for _ in range(3):
            generate(daemon.url, "llama_65b")
        daemon.stop()
    told = [line for line in daemon.lines if line.startswith("kvloom: ")]
    assert told == [f"kvloom: {tmp_path}/logs/mindservice.log cannot be written: No space left on device"]
    assert not [line for line in daemon.lines if "Traceback" in line]


def test_a_disk_that_has_room_again_is_told_with_what_was_lost(tmp_path, capsys):
    handler = logs._file("logPath", tmp_path / "x.log", LogConfig())
    whole = handler.stream
    with open("/dev/full", "a", buffering=1) as full:
        handler.stream = full
        for _ in range(3):
            handler.emit(logging.makeLogRecord({"msg": "lost"}))
        handler.stream = whole
        handler.emit(logging.makeLogRecord({"msg": "kept"}))
        handler.emit(logging.makeLogRecord({"msg": "kept too"}))
        handler.close()
        told = capsys.readouterr().err.splitlines()
        with contextlib.suppress(OSError):
            full.close()
    assert told == [
        f"kvloom: {tmp_path}/x.log cannot be written: No space left on device",
        f"kvloom: {tmp_path}/x.log is written again; 3 lines were lost",
    ]
    assert (tmp_path / "x.log").read_text() == "kept\nkept too\n"


def write(handler: logging.Handler, *lines: str) -> None:
    for line in lines:
        handler.emit(logging.makeLogRecord({"msg": line}))


@pytest.mark.parametrize("how", [Path.unlink, lambda path: path.rename(path.with_name("moved"))])
def test_a_log_that_is_moved_or_removed_goes_on_under_its_name(tmp_path, how):
    """As by logrotate, or by another server with the same path that begins the next file."""
    handler = logs._file("logPath", tmp_path / "x.log", LogConfig())
    write(handler, "one")
    how(tmp_path / "x.log")
    write(handler, "two", "three")
    handler.close()
    assert (tmp_path / "x.log").read_text() == "two\nthree\n"


def test_of_no_older_files_none_is_kept_and_the_log_keeps_its_size(tmp_path):
    handler = logs._file("logPath", tmp_path / "x.log", LogConfig(max_bytes=1000, num_old=0))
    write(handler, *(f"{number:099}" for number in range(25)))
    handler.close()
    assert (tmp_path / "x.log").read_text().split() == [f"{number:099}" for number in range(18, 25)]
    assert [path.name for path in tmp_path.iterdir()] == ["x.log"]


def test_a_log_whose_next_file_cannot_begin_loses_no_line(tmp_path, capsys):
    handler = logs._file("logPath", tmp_path / "x.log", LogConfig(max_bytes=1000, num_old=1))
    (tmp_path / "x.log.1" / "in").mkdir(parents=True)
    write(handler, *(f"{number:099}" for number in range(25)))
    assert len((tmp_path / "x.log").read_text().split()) == 25
    (tmp_path / "x.log.1" / "in").rmdir()
    (tmp_path / "x.log.1").rmdir()
    write(handler, "next")
    handler.close()
    assert (tmp_path / "x.log").read_text() == "next\n"
    [told] = capsys.readouterr().err.splitlines()
    why = "grows beyond its size, because no next file can be begun: Is a directory"
    assert told == f"kvloom: {tmp_path}/x.log {why}"


def test_a_path_that_is_no_utf_8_stands_in_the_log(tmp_path, capsys):
    handler = logs._file("logPath", tmp_path / "x.log", LogConfig())
    write(handler, f"loading {os.fsdecode(b'/models/' + bytes([255]))}")
    handler.close()
    assert (tmp_path / "x.log").read_text() == "loading /models/\\udcff\n"
    assert capsys.readouterr().err == ""


def test_a_pipe_for_a_log_is_never_waited_for(tmp_path, capsys):
    """Neither for a reader, nor for one that has stopped reading: a server would hang with all of its requests."""
    pipe = tmp_path / "x.log"
    os.mkfifo(pipe)
    with pytest.raises(BadRequest, match=f"logPath: {pipe} cannot be written: it is a pipe that nobody reads"):
        logs._file("logPath", pipe, LogConfig())
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    handler = logs._file("logPath", pipe, LogConfig())
    for number in range(100):  # more than a pipe holds
        handler.emit(logging.makeLogRecord({"msg": f"{number} {'x' * 2000}"}))
    read = b""
    with contextlib.suppress(BlockingIOError):
        while True:
            read += os.read(reader, 1 << 16)
    assert read.startswith(b"0 xxx")
    handler.emit(logging.makeLogRecord({"msg": "kept"}))
    assert os.read(reader, 1 << 20).endswith(b"kept\n")
    handler.close()
    os.close(reader)
    told = capsys.readouterr().err.splitlines()
    assert told[0] == f"kvloom: {pipe} cannot be written: write could not complete without blocking"
    assert re.fullmatch(f"kvloom: {pipe} is written again; [0-9]+ lines were lost", told[1])


def test_the_python_log_is_a_file_of_its_own(tmp_path):
    path = tmp_path / "python" / "pythonlog.log"
    given = {"MIES_PYTHON_LOG_TO_FILE": "1", "MIES_PYTHON_LOG_PATH": str(path)}
    with serving([*DAEMON, "--config", str(install(tmp_path))], **given) as daemon:
        generated(daemon, tmp_path)
        python = path.with_name(f"pythonlog.log.{daemon.process.pid}")
        until(lambda: "COMPLETED" in python.read_text())
        assert "npuBlockNum" in python.read_text()


def test_what_a_file_asks_for_in_vain_stands_in_the_log(tmp_path):
    config = install(tmp_path)
    model = {"modelName": "llama_65b", "modelWeightPath": "m", "backendType": "mock"}
    document = {
        "ServerConfig": {"port": free_port(), "interCommPort": 1121},
        "BackendConfig": {
            "ModelDeployConfig": {"ModelConfig": [model]},
            "ScheduleConfig": {"maxFirstTokenWaitTime": 600},
        },
        "LogConfig": {"logLevel": "Info", "logPath": "logs/mindservice.log"},
    }
    config.write_text(json.dumps(document))
    config.chmod(0o644)
    with serving([*DAEMON, "--config", str(config)]) as daemon:
        log = generated(daemon, tmp_path)
    idle = "BackendConfig.ScheduleConfig.maxFirstTokenWaitTime, ServerConfig.interCommPort"
    assert f"without effect here: {idle}" in log
    assert "can be read by everybody" in log


def test_one_lone_request_is_a_batch_of_one_with_its_own_blocks(tmp_path):
    with serving([*DAEMON, "--config", str(install(tmp_path))]) as daemon:
        log = generated(daemon, tmp_path)
    [line] = [line for line in log.splitlines() if "COMPLETED" in line]
    columns = line.rpartition(": ")[2].split(" , ")
    assert len(columns) == 8
    assert (columns[5], columns[6], columns[7]) == ("1", columns[1], "1")


def test_verbose_tells_steps_and_cache_hits(tmp_path):
    config = install(tmp_path)
    config.write_text(config.read_text().replace('"logLevel": "Info"', '"logLevel": "Verbose"'))
    with serving([*DAEMON, "--config", str(config)]) as daemon:
        log = generated(daemon, tmp_path)
    assert re.search(r"DEBUG .*kvloom\.engine\.verbose: step: 1 requests, 0 decoding, \d+ tokens", log)
    assert re.search(r"r1-\S* begins: \d+ prompt tokens, 0 of them cached", log)


def test_a_rank_that_ends_is_told_in_the_log_and_its_successor_serves(tmp_path):
    with serving([*DAEMON, "--config", str(install(tmp_path))]) as daemon:
        generated(daemon, tmp_path)
        os.kill(daemon.rank_pid(), signal.SIGKILL)
        until(lambda: "the model is ready again" in written(tmp_path))
        until(lambda: httpx.get(daemon.url + "/health").status_code == 200)


@pytest.mark.parametrize(
    ("line", "level", "logger", "told"),
    [
        ("WARNING kvloom.rank.tier: the pool is not there", logging.WARNING, "kvloom.rank.tier", "rank 3: the pool"),
        ("DEBUG kvloom.rank.runner: a: b", logging.DEBUG, "kvloom.rank.runner", "rank 3: a: b"),
        ("Traceback (most recent call last):", logging.WARNING, "kvloom.processes", "rank 3: Traceback (most"),
    ],
)
def test_lines_of_a_rank_keep_level_and_logger(caplog, line, level, logger, told):
    with caplog.at_level(logging.DEBUG):
        childlog.tell(line, "rank 3")
    [record] = caplog.records
    assert (record.levelno, record.name) == (level, logger)
    assert record.message.startswith(told)


def test_what_a_rank_prints_is_logged(caplog):
    read, write = os.pipe()
    thread = childlog.relay(os.fdopen(read, "rb"), "rank 1")
    os.write(write, b"WARNING kvloom.rank.runner: slower\n\nsegfault")
    os.close(write)
    thread.join(120)
    assert [record.message for record in caplog.records] == ["rank 1: slower", "rank 1: segfault"]


def test_a_rank_is_started_with_the_documented_arguments():
    given = RankArguments(1, 2, 5, False, 7, logging.WARNING)
    argv = given.argv()
    assert argv[:6] == ["1", "2", "5", "Standard", "INTER_PROCESS", "LLM_EXECUTOR_PYTHON"]
    assert argv[6:] == [str(os.getpid()), "socket:7", "1", "1", "0", "0", "-"]
    argv[6] = str(os.getppid())
    assert parse(argv) == given


@pytest.mark.parametrize(
    ("index", "value", "words"),
    [(3, "Best", "Model_Instance_Type: must be Standard or StandardMock"), (6, "1", "Parent_Pid: must be"),
     (7, "shm", "Shared_Memory_Name: must be socket:N"), (8, "2", "Log_Error to Log_Verbose: must be 0 or 1")],
)  # fmt: skip
def test_a_wrong_argument_of_a_rank_is_named(index, value, words):
    argv = RankArguments(0, 1, 0, True, 7, logging.INFO).argv()
    argv[6] = str(os.getppid())
    argv[index] = value
    with pytest.raises(ValueError, match=words):
        parse(argv)
    with pytest.raises(ValueError, match="a rank is started by its server, with: Rank World_Size"):
        parse(argv[:2])


def test_a_rank_runs_on_the_cores_of_its_device():
    core = min(os.sched_getaffinity(0))
    engine = open_engine(EngineConfig(backend="fake", rank_cores=((core,),)), ByteTokenizer)
    try:
        [pid] = engine._executor.pids
        threads = [int(task) for task in os.listdir(f"/proc/{pid}/task")]
        assert [os.sched_getaffinity(thread) for thread in threads] == [{core}] * len(threads)
    finally:
        engine.close()
