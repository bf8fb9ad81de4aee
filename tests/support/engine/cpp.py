"""C++ programs against libkvloom_engine.so: compiled, and run with a host that the test chooses."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvloom.engine_api.build import LIBRARY
from tests.support.compiling import compiled, units
from tests.support.configs import mock_document
from tests.support.lent import lend

PROGRAMS = Path(__file__).parents[2] / "engine" / "api" / "cpp"
EXAMPLE = Path(__file__).parents[3] / "examples" / "engine_api.cpp"
HEADERS = LIBRARY.include / "kvloom_engine"
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-pedantic")
QUICK = ("-g1", "-O0")  # line numbers, which sanitizers print, but no variables
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
THREAD_SANITIZER = ("-fsanitize=thread",)
LONG = 60_000  # tokens; the mock model needs seconds for so many


def write_config(folder: Path, **schedule: int) -> Path:
    """A config.json of the mock model with room for sequences of LONG tokens; `schedule` overrides values of its
    ScheduleParam.
    """
    document = mock_document(**schedule)
    document["ModelDeployParam"]["maxSeqLen"] = LONG
    return _write(folder, document)


def write_real_config(folder: Path, model: Path) -> Path:
    """A config.json of a model's files."""
    document = mock_document()
    deployed = document["ModelDeployParam"]["ModelParam"][0]
    deployed |= {"modelInstanceType": "Standard", "modelName": "real", "modelWeightPath": str(model)}
    return _write(folder, document)


def _write(folder: Path, document: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(document))
    path.chmod(0o600)
    return path


def write_host(path: Path, *command: str) -> Path:
    """A program in place of the host: runs `command` with its socket's number; writes its process id to PATH.pid."""
    words = " ".join(shlex.quote(word) for word in command)
    path.write_text(f'#!/bin/sh\necho $$ > "$0.pid"\nexec {words} "$@"\n')
    path.chmod(0o700)
    return path


def forked_host(folder: Path) -> Path:
    return lend(folder / "host", "-m", "kvloom.engine_api.host")


def real_host(folder: Path) -> Path:
    return write_host(folder / "host", sys.executable, "-m", "kvloom.engine_api.host")


def compile_program(source: Path, *flags: str) -> Path:
    """A program linked with the library, compiled with strict C++11 warnings."""
    lib = LIBRARY.path()
    command = ["c++", "-std=c++11", *QUICK, *WARNINGS, f"-I{HEADERS}", *flags, source]
    return compiled(
        [*command, f"-L{lib.parent}", f"-Wl,-rpath,{lib.parent}", f"-l:{lib.name}", "-pthread"], source.stem
    )


def compile_example() -> Path:
    """examples/engine_api.cpp, which also includes the headers of the document's program."""
    return compile_program(EXAMPLE, "-idirafter", str(HEADERS / "sample"))


def compile_sanitized(source: Path, *flags: str) -> Path:
    """A program that has the library's own files compiled in, so that a sanitizer sees them."""
    command = ["c++", "-std=c++17", "-D_GNU_SOURCE", *QUICK, *WARNINGS, f"-I{LIBRARY.include}", *flags]
    library = units(command, LIBRARY.source_files())
    command = ["c++", "-std=c++11", *QUICK, *WARNINGS, f"-I{HEADERS}", *flags, source]
    return compiled([*command, *library, "-pthread", "-ldl"], source.stem)


def run_program(program: Path, host: Path, *arguments: str, timeout_s: float = 100, **environ: str) -> str:
    """Runs a program, which must succeed. Returns its output."""
    done = subprocess.run(
        [str(program), *arguments],
        env={**os.environ, "KVLOOM_ENGINE_HOST": str(host), **environ},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
