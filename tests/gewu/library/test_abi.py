"""Programs in C and C++ against libqos.so and a daemon with the fake engine."""

import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kvloom.gewu.build import library
from tests.support.compiling import compiled
from tests.support.gewu.daemons import (
    ABI,
    DEMO_MODEL,
    DaemonProcess,
    compile_c,
    compile_demo,
    compile_with_library,
    drive_program,
    has_nlohmann,
    run_program,
)
from tests.support.gewu.service import Peer, Service
from tests.support.waiting import until

EXPORTED = {
    "OH_QoS_SetThreadQoS",
    "OH_QoS_ResetThreadQoS",
    "OH_QoS_GetThreadQoS",
    "OH_QoS_GewuCreateSession",
    "OH_QoS_GewuDestroySession",
    "OH_QoS_GewuSubmitRequest",
    "OH_QoS_GewuAbortRequest",
    "GewuCreateSession",
    "GewuDestroySession",
    "GewuSubmitRequest",
    "GewuAbortRequest",
}
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
THREAD_SANITIZER = ("-fsanitize=thread",)
STRESS_S = os.environ.get("STRESS_S", "1")  # seconds; STRESS_S=60 makes a long run


def test_exactly_the_public_functions_are_exported():
    done = subprocess.run(["nm", "-D", "--defined-only", library()], capture_output=True, text=True, check=True)
    assert {line.split()[-1] for line in done.stdout.splitlines()} == EXPORTED


def test_only_libc_is_needed():
    done = subprocess.run(["readelf", "-d", library()], capture_output=True, text=True, check=True)
    needed = [line.split("[")[1] for line in done.stdout.splitlines() if "NEEDED" in line]
    assert all(name.startswith(("libc.so", "ld-linux")) for name in needed), needed


@pytest.mark.parametrize("standard", ["c89", "c99", "c11", "c17", "c++11", "c++20"])
def test_the_header_compiles_in_every_standard(standard, tmp_path):
    language = "c++" if "++" in standard else "c"
    source = tmp_path / "include.c"
    source.write_text("#include <qos/qos.h>\nOH_QoS_GewuSession session = OH_QOS_GEWU_INVALID_SESSION_ID;\n")
    flags = ["-Wall", "-Wextra", "-Werror", "-pedantic", f"-I{library_include()}"]
    subprocess.run(["cc", "-x", language, f"-std={standard}", *flags, "-fsyntax-only", source], check=True)


def library_include() -> Path:
    return Path(__file__).parents[3] / "src" / "kvloom" / "gewu" / "include"


@pytest.mark.parametrize("name", ["calls", "reentrant"])
def test_the_calls_and_their_answers(name, daemon, model, tmp_path):
    run_program(compile_c(ABI / f"{name}.c"), daemon, str(model))


@pytest.mark.parametrize("name", ["calls", "reentrant"])
def test_they_are_clean_under_sanitizers(name, daemon, model, tmp_path):
    run_program(compile_with_library(ABI / f"{name}.c", *SANITIZERS), daemon, str(model))


def test_requests_have_limits_and_ended_ones_are_remembered(start_daemon, model, tmp_path):
    run_program(compile_c(ABI / "limits.c"), start_daemon({"rate": 1e6, "tokens": ["a", "b"]}), str(model))


def test_a_service_that_is_lost_within_a_call_is_a_fault(model, tmp_path):
    def script(peer: Peer) -> None:
        peer.create()
        peer.expect("S")
        peer.sock.shutdown(socket.SHUT_RDWR)

    service = Service(tmp_path / "gewu.sock", script)
    run_program(compile_c(ABI / "vanished.c"), service, str(model))
    service.join()
    service.close()


def test_no_callback_comes_after_abort(daemon, model, tmp_path):
    printed = run_program(compile_c(ABI / "aborts.c"), daemon, str(model), "10000")
    assert printed.split()[0] == "10000"


@pytest.mark.timeout(180)
@pytest.mark.parametrize("flags", [SANITIZERS, THREAD_SANITIZER], ids=["address", "thread"])
def test_random_calls_of_sixteen_threads_are_clean_under_sanitizers(start_daemon, model, tmp_path, flags):
    program = compile_with_library(ABI / "stress.c", *flags)
    daemon = start_daemon({"rate": 500})
    run_program(program, daemon, str(model), STRESS_S, timeout_s=150)
    until(lambda: daemon.status()["sessions"] == [])


@pytest.mark.parametrize("flags", [SANITIZERS, THREAD_SANITIZER], ids=["address", "thread"])
def test_of_threads_that_race_one_wins(daemon, model, tmp_path, flags):
    run_program(compile_with_library(ABI / "races.c", *flags), daemon, str(model), "50")


def test_children_of_a_generating_process_have_their_own_sessions(daemon, model, tmp_path):
    run_program(compile_c(ABI / "forks.c"), daemon, str(model), "20")


def test_loaded_locally_and_unloaded_while_a_request_runs(daemon, model, tmp_path):
    program = compiled(["cc", f"-I{library_include()}", ABI / "loader.c", "-ldl", "-pthread"], "loader")
    run_program(program, daemon, str(library()), str(model))


@pytest.mark.parametrize("flags", [SANITIZERS, THREAD_SANITIZER], ids=["address", "thread"])
def test_when_the_daemon_is_killed_each_request_ends_once(start_daemon, model, tmp_path, flags):
    daemon = start_daemon({"rate": 20})
    program = compile_with_library(ABI / "lost.c", *flags)
    drive_program(program, daemon, str(model), {"running": daemon.kill, "lost": daemon.start})


@pytest.mark.skipif(not has_nlohmann(), reason="needs g++ and nlohmann/json.hpp (Debian: nlohmann-json3-dev)")
@pytest.mark.parametrize("standard", ["c++11", "c++14", "c++17", "c++20"])
def test_the_demo_of_the_specification(standard, start_daemon: Callable[..., DaemonProcess], model, tmp_path):
    program = compile_demo(f"-std={standard}")
    daemon = start_daemon({}, "--alias", f"{DEMO_MODEL}={model}")
    run_program(program, daemon, "500" if standard == "c++17" else "20")
