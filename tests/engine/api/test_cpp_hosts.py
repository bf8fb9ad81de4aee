"""libkvloom_engine.so with hosts that die, freeze or violate its protocol: every request ends exactly once."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.engine import host as engine_host
from tests.support.engine.cpp import (
    PROGRAMS,
    SANITIZERS,
    THREAD_SANITIZER,
    compile_example,
    compile_program,
    compile_sanitized,
    real_host,
    run_program,
    write_config,
    write_host,
)
from tests.support.waiting import until

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler"),
]
Lines = list[str]
RunProbe = Callable[..., Lines]
PATIENCE = ("-DKVLOOM_ENGINE_PATIENCE_MS=1000", "-DKVLOOM_ENGINE_START_MS=3000", "-DKVLOOM_ENGINE_END_MS=300")
EXEC_ERROR, EOS = 3, 1


@pytest.fixture(scope="module", params=[SANITIZERS, THREAD_SANITIZER], ids=["address", "thread"])
def probe(request) -> Path:
    """The program and the library, compiled with the short timeouts of PATIENCE."""
    return compile_sanitized(PROGRAMS / "probe.cpp", *request.param, *PATIENCE)


@pytest.fixture
def run_probe(probe: Path, tmp_path: Path) -> RunProbe:
    """Runs the probe with a scripted host; returns its output lines, with the host's path replaced by HOST."""

    def run(script: str, *arguments: str) -> Lines:
        host = write_host(tmp_path / "host", sys.executable, engine_host.__file__, script)
        return run_program(probe, host, *arguments).replace(str(host), "HOST").splitlines()

    return run


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("silent", "1 the engine's host has given no sign of life for 3000 ms"),
        (
            "stranger",
            "1 the engine's host HOST, of kvloom 9.9, speaks protocol 2, this library 1: install the library of that "
            "kvloom, `kvloom engine install`",
        ),
        ("leaves", "1 the engine's host HOST exited with 3"),
        ("garbage", "1 the engine's host HOST broke the protocol"),
        ("answers_before_hello", "1 the engine's host HOST broke the protocol"),
        ("refuses", "2 modelWeightPath: is missing"),
        ("dies_loading", "1 the engine's host HOST was killed by signal 9"),
    ],
)
def test_a_host_that_cannot_be_initialised_says_why(run_probe, script, said):
    assert run_probe(script) == [f"init {said}"]


def test_a_host_that_is_not_there_says_so(probe, tmp_path):
    printed = run_program(probe, tmp_path / "none")
    assert printed == f"init 1 the engine's host {tmp_path}/none cannot be started: No such file or directory\n"


@pytest.mark.parametrize(("script", "code"), [("dies_running", 6), ("responds_and_dies", 5)])
def test_a_request_that_was_accepted_ends_when_the_host_does(run_probe, script, code):
    why = f"the engine's host HOST exited with {code}"
    quotas, finalize = f"quotas 1 {why}", f"finalize 1 {why}"
    assert run_probe(script) == ["init 0 ", "forward 0 ", f"first {EXEC_ERROR} 1 {why}", quotas, finalize, "ended 1"]


def test_a_request_that_was_not_answered_has_no_response(run_probe):
    why = "the engine's host HOST exited with 4"
    assert run_probe("dies_unanswered") == [
        "init 0 ",
        f"forward 1 {why}",
        f"quotas 1 {why}",
        f"finalize 1 {why}",
        "ended 0",
    ]


def test_what_comes_after_the_end_of_a_request_is_dropped(run_probe):
    assert run_probe("ends_twice") == [
        "init 0 ",
        "forward 0 ",
        f"first {EOS} 1 ",
        "quotas 0 ",
        "finalize 0 ",
        "ended 1",
    ]


def test_a_request_that_is_answered_too_late_is_stopped_and_has_no_response(run_probe):
    why = "the engine's host has given no sign of life for 1000 ms"
    assert run_probe("answers_late") == ["init 0 ", f"forward 1 {why}", "quotas 0 ", "finalize 0 ", "ended 0"]


def test_an_answer_that_lacks_numbers_is_an_error(run_probe):
    assert "quotas 1 the engine's host broke the protocol" in run_probe("few_quotas")


@pytest.mark.parametrize(
    "script",
    ["unknown_flag", "unknown_code", "unknown_letter", "short_answer", "long_text", "many_tokens", "empty", "endless"],
)
def test_a_host_that_breaks_the_protocol_ends_its_requests(run_probe, script):
    lines = run_probe(script)
    assert f"first {EXEC_ERROR} 1 the engine's host HOST broke the protocol" in lines
    assert lines[-1] == "ended 1"


def test_a_frozen_host_is_given_up_and_its_requests_end_with_the_engine(run_probe, tmp_path):
    why = "the engine's host has given no sign of life for 1000 ms"
    lines = run_probe("serves", "freeze", f"{tmp_path / 'host'}.pid")
    assert lines[1:5] == ["forward 0 ", f"forward 1 {why}", f"quotas 1 {why}", f"finalize 1 {why}"]
    ends = [f"{name} {EXEC_ERROR} 1 the engine is closing" for name in ("first", "second")]
    assert lines[5:] == [*ends, "ended 2"]


def test_a_killed_host_ends_its_requests_and_the_engine_can_be_initialised_again(tmp_path):
    host, config = real_host(tmp_path), write_config(tmp_path)
    program = compile_program(PROGRAMS / "probe.cpp")
    lines = run_program(program, host, "kill", f"{host}.pid", str(config)).splitlines()
    why = f"the engine's host {host} was killed by signal 9"
    ends = [f"{name} {EXEC_ERROR} 1 {why}" for name in ("first", "second")]
    calls = [f"forward 1 {why}", f"quotas 1 {why}", f"finalize 1 {why}"]
    assert lines == ["init 0 ", "forward 0 ", *ends, *calls, "ended 2", "again 0 ", "finalize 0 Success"]


@pytest.mark.parametrize("are_stopped", [False, True])
def test_a_killed_program_takes_its_host_and_its_model_along(tmp_path, are_stopped):
    host, config = real_host(tmp_path), write_config(tmp_path)
    program, data = compile_example(), tmp_path / "data.csv"
    data.write_text("1,2,3\n" * 1000)
    command = [str(program), str(config), str(data)]
    environ = {**os.environ, "KVLOOM_ENGINE_HOST": str(host)}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        pid = int(Path(f"{host}.pid").read_text())
        processes = [pid, *children_of(pid)]
        for each in processes if are_stopped else ():
            os.kill(each, signal.SIGSTOP)
        process.kill()
    assert len(processes) >= 2
    until(lambda: not any(is_running(pid) for pid in processes))


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
