"""Of programs that start at the same moment on one address one serves; the others print the reason and exit with 1."""

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.server.run.test_daemon import DAEMON, install
from tests.support.pool.agents import SECRET
from tests.support.ports import free_port
from tests.support.processes import CLI
from tests.support.waiting import WAIT_S, until

NUM_RIVALS = 3
AGENT = (*CLI, "pool", "agent", "--pool", "8M", "--no-prefault")


def start(stack: ExitStack, command: Sequence[object]) -> "subprocess.Popen[str]":
    """Start a process, which the stack kills at its end."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = stack.enter_context(subprocess.Popen([*map(str, command)], text=True, **pipes))
    stack.callback(process.kill)
    return process


def check_one_lives(commands: Sequence[Sequence[object]], success: str, problem: str) -> None:
    """One process stays and prints `success`; the others exit with one line, with `problem` in it, and no `success`."""
    with ExitStack() as stack:
        rivals = [start(stack, command) for command in commands]
        until(lambda: sum(rival.poll() is not None for rival in rivals) == len(rivals) - 1)
        (living,) = (rival for rival in rivals if rival.poll() is None)
        assert living.stdout is not None
        assert any(success in line for line in living.stdout), "it ended without listening"
        for rival in rivals:
            if rival is not living:
                out, err = rival.communicate()
                assert (rival.returncode, success in out) == (1, False)
                assert problem in err
                assert len(err.splitlines()) == 1


def in_use(port: int) -> str:
    return f"port {port} of 127.0.0.1 is in use by another program"


def test_servers_on_one_port():
    port = free_port()
    command = [*CLI, "serve", "--backend", "fake", "--port", port]
    check_one_lives([command] * NUM_RIVALS, "Daemon start success!", in_use(port))


def test_daemons_on_one_management_port(tmp_path):
    management, commands = free_port(), []
    for name in "abc"[:NUM_RIVALS]:
        (tmp_path / name).mkdir()
        config = install(tmp_path / name, ("one", "two"), managementPort=management)
        commands.append([*DAEMON, "--config", config, "--pid-file", tmp_path / name / "pid"])
    check_one_lives(commands, "Daemon start success!", in_use(management))


def test_a_server_that_lives_answers_on_its_port_and_the_second_is_told_before_its_model_is_loaded(tmp_path):
    config = install(tmp_path)
    port = json.loads(config.read_text())["OtherParam"]["ServeParam"]["port"]
    with ExitStack() as stack:
        first = start(stack, [*DAEMON, "--config", config])
        assert first.stdout is not None
        assert first.stdout.readline() == "Daemon start success!\n"
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
        broken = tmp_path / "broken.gguf"
        broken.write_bytes(b"GGUF")
        second = start(stack, [*CLI, "serve", broken, "--port", port])
        _, err = second.communicate(timeout=WAIT_S)
        assert err.startswith(f"kvloom: {in_use(port)}")


def cluster(folder: Path, name: str) -> list[object]:
    """The command of an agent with its own socket."""
    secret = folder / "secret"
    secret.write_bytes(SECRET)
    return [*AGENT, "--socket", folder / f"{name}.sock", "--secret-file", secret]


def test_agents_on_one_socket(tmp_path):
    path = tmp_path / "ems.sock"
    command = [*AGENT, "--socket", path]
    check_one_lives([command] * NUM_RIVALS, f"serving {path}", f"{path} is in use by another program")


@pytest.mark.parametrize("option", ["--listen", "--http"])
def test_agents_on_one_port(tmp_path, option):
    port = free_port()
    commands = [[*cluster(tmp_path, name), option, f"127.0.0.1:{port}"] for name in "abc"[:NUM_RIVALS]]
    check_one_lives(commands, "serving ", f"kvloom pool agent: {option}: {in_use(port)}")


def test_control_planes_on_one_port(tmp_path):
    port, secret = free_port(), tmp_path / "secret"
    secret.write_bytes(SECRET)
    command = [sys.executable, "-m", "kvloom.cli", "pool", "control", "--secret-file", secret]
    commands = [[*command, "--state", tmp_path / f"{i}.db", "--listen", f"127.0.0.1:{port}"] for i in range(NUM_RIVALS)]
    check_one_lives(commands, f"serving http://127.0.0.1:{port}", in_use(port))
