"""Gewu daemons on sockets of their own, model folders for the fake engine, and C programs against libqos.so."""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from kvloom.gewu.build import INCLUDE, PACKAGE, library
from kvloom.gewu.status import ask_status
from tests.support.compiling import compiled, objects
from tests.support.waiting import WAIT_S, until

ABI = Path(__file__).parents[2] / "abi"
PATIENCE = ("-include", str(ABI / "patience.h"), "-DGEWU_PATIENCE_MS=test_patience()")
DEMO_MODEL = "/data/storage/el2/base/files/qwen2-awq"  # fixed in the specification's demo


def make_model(folder: Path, num_bytes: int = 1000, **config: Any) -> Path:
    """A folder that the fake engine accepts as a model of `num_bytes` (a sparse file)."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(num_bytes)
    return folder


class Environment(Protocol):
    """The environment with which an app finds a service."""

    environ: dict[str, str]


class DaemonProcess:
    """`kvloom gewu daemon` in a process. `fake`: settings of the fake engine, None for workers."""

    def __init__(self, folder: Path, fake: Mapping[str, Any] | None, *options: str, **environ: str) -> None:
        self.socket = folder / "gewu.sock"
        psi = folder / "pressure"
        psi.mkdir(exist_ok=True)
        self.psi_file = psi / "memory"
        self.environ = {**os.environ, "GEWU_SOCKET": str(self.socket), "GEWU_PSI_FILE": str(self.psi_file), **environ}
        if fake is not None:
            self.environ["GEWU_FAKE_ENGINE"] = json.dumps(fake)
        self._options = options
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "kvloom.gewu", "daemon", *self._options]
        self.process = subprocess.Popen(command, env=self.environ)
        until(self._listens)

    def status(self) -> dict[str, Any]:
        return ask_status(self.socket)

    def model(self) -> dict[str, Any]:
        """The only model."""
        (found,) = self.status()["models"]
        return found

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def freeze(self) -> None:
        """Stops the process with SIGSTOP, so that it answers nothing until `thaw`."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.thaw()
            self.process.terminate()
        self.process.wait(WAIT_S)

    def _listens(self) -> bool:
        assert self.process.poll() is None, "the daemon has ended"
        try:
            self.status()
        except OSError:
            return False
        return True


def compile_c(source: Path, *flags: str, compiler: str = "cc") -> Path:
    """A program linked with libqos.so."""
    lib = library()
    command = [compiler, "-g1", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{INCLUDE}", *flags, source]
    link = [f"-L{lib.parent}", f"-Wl,-rpath,{lib.parent}", f"-l:{lib.name}", "-pthread", "-ldl"]
    return compiled([*command, *link], source.stem)


def compile_demo(*flags: str) -> Path:
    """The specification's demo, unchanged, with a main that runs it as often as its argument says."""
    return compile_c(ABI / "demo_main.cpp", str(ABI / "demo.cpp"), "-O0", *flags, compiler="c++")


def compile_with_library(source: Path, *flags: str) -> Path:
    """A program with the library's own files compiled in, so that a sanitizer sees them."""
    command = [
        "cc",
        "-g1",
        "-O1",
        "-std=c11",
        "-D_GNU_SOURCE",
        "-Wall",
        "-Wextra",
        "-Werror",
        f"-I{INCLUDE}",
        *PATIENCE,
        *flags,
    ]
    files = objects(command, sorted((PACKAGE / "c").glob("*.c")))
    return compiled([*command, source, *files, "-pthread", "-ldl"], source.stem)


def run_program(program: Path, daemon: Environment, *arguments: str, timeout_s: float = 60) -> str:
    """Runs it against the daemon; it must succeed. Returns its output."""
    done = subprocess.run(
        [str(program), *arguments], env=daemon.environ, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def drive_program(program: Path, daemon: Environment, argument: str, steps: Mapping[str, Callable[[], object]]) -> None:
    """Runs it as `run_program` does; for each line that it prints, runs the step of that name, then lets it
    continue.
    """
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([program, argument], env=daemon.environ, text=True, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in process.stdout:
            steps[line.strip()]()
            process.stdin.write("go\n")
            process.stdin.flush()
        _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, errors


def has_nlohmann() -> bool:
    """Whether the JSON library that the specification's demo includes is there (Debian: nlohmann-json3-dev)."""
    return shutil.which("c++") is not None and any(
        (Path(folder) / "nlohmann" / "json.hpp").exists() for folder in ("/usr/include", "/usr/local/include")
    )


class Client:
    """An app in a process of its own (tests/gewu/client.py): every call goes through the C ABI."""

    def __init__(self, service: Environment) -> None:
        command = [sys.executable, "-m", "tests.gewu.client"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=service.environ, **pipes)
        self._last_context = 0

    def call(self, name: str, *arguments: Any) -> Any:
        self.send(name, *arguments)
        return self.answer()

    def send(self, name: str, *arguments: Any) -> None:
        """Starts a call whose `answer` is read later."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], WAIT_S)[0], "the app does not come back from its call"
        return json.loads(self.process.stdout.readline())

    def create(self, model: object, **attributes: Any) -> int:
        """A session's handle; the call must succeed."""
        error, handle = self.call("create", json.dumps({"model": str(model), **attributes}))
        assert error == 0
        return int(handle)

    def submit(self, session: int, **options: Any) -> int:
        """Submits a request; returns the context for `wait`."""
        self._last_context += 1
        request = {"messages": [{"role": "user", "content": "hi"}], "stream": True, **options}
        error, _ = self.call("submit", session, json.dumps(request), self._last_context)
        assert error == 0
        return self._last_context

    def wait(self, context: int) -> list[dict[str, Any]]:
        """All replies up to the final one."""
        found: list[dict[str, Any]] = self.call("wait", context)
        return found

    def ask(self, session: int, **options: Any) -> list[dict[str, Any]]:
        return self.wait(self.submit(session, **options))

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(WAIT_S)
        self.process.stdout.close()
