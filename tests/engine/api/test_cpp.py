"""The Engine API in C++ (spec 3.3.1): programs against libkvloom_engine.so and the mock model."""

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kvloom.engine_api.build import LIBRARY
from tests.support.compiling import compiled
from tests.support.engine.cpp import (
    HEADERS,
    LONG,
    PROGRAMS,
    SANITIZERS,
    THREAD_SANITIZER,
    WARNINGS,
    compile_program,
    compile_sanitized,
    forked_host,
    run_program,
    write_config,
)

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler"),
]
Compile = Callable[[str], Path]


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> str:
    """A configuration under which no request reaches its end before a test stops it."""
    return str(write_config(tmp_path_factory.mktemp("config"), maxIterTimes=LONG - 1000))


@pytest.fixture(scope="module")
def host(tmp_path_factory) -> Path:
    return forked_host(tmp_path_factory.mktemp("host"))


@pytest.fixture(scope="module", params=[SANITIZERS, THREAD_SANITIZER], ids=["address", "thread"])
def sanitized(request) -> Compile:
    """Compiles a program of this folder, together with the library, under a sanitizer."""
    return lambda name: compile_sanitized(PROGRAMS / f"{name}.cpp", *request.param)


def test_only_the_documented_namespaces_are_exported():
    done = subprocess.run(["nm", "-DC", "--defined-only", LIBRARY.path()], capture_output=True, text=True, check=True)
    names = [line.split(maxsplit=2)[2] for line in done.stdout.splitlines()]
    owned = re.compile(r"((vtable|typeinfo|typeinfo name) for )?(llm::engine|infrastructure)::")
    assert len(names) > 80
    assert [name for name in names if not owned.match(name)] == []


def test_only_libc_and_libstdcpp_are_needed():
    done = subprocess.run(["readelf", "-d", LIBRARY.path()], capture_output=True, text=True, check=True)
    needed = {line.split("[")[1].split(".so")[0] for line in done.stdout.splitlines() if "NEEDED" in line}
    assert needed <= {"libstdc++", "libgcc_s", "libc", "libm", "ld-linux-x86-64", "ld-linux-aarch64"}


@pytest.mark.parametrize("header", sorted(path.name for path in HEADERS.glob("*.h")))
@pytest.mark.parametrize("standard", ["c++11", "c++20"])
def test_each_header_stands_alone_in_every_standard(header, standard):
    twice = ("-include", header, "-include", header, "-x", "c++", "/dev/null")
    compiled(["c++", f"-std={standard}", *WARNINGS, f"-I{HEADERS}", *twice, "-c"], f"{header}.o")


def test_codes_names_tensors_and_requests(host, tmp_path):
    run_program(compile_program(PROGRAMS / "values.cpp"), host)


def test_the_calls_and_their_answers(host, config, tmp_path):
    run_program(compile_program(PROGRAMS / "calls.cpp"), host, config)


@pytest.mark.parametrize("name", ["values", "calls"])
def test_they_are_clean_under_sanitizers(name, sanitized, host, config):
    run_program(sanitized(name), host, config, timeout_s=250)


def test_many_threads_and_callbacks_that_call_back_in(sanitized, host, config):
    run_program(sanitized("threads"), host, config, "2", timeout_s=250)


def test_callbacks_that_throw_and_engines_that_are_destroyed(sanitized, host, config):
    run_program(sanitized("ends"), host, config, timeout_s=250)


def test_children_have_engines_of_their_own(host, config, tmp_path):
    run_program(compile_program(PROGRAMS / "forks.cpp"), host, config)
