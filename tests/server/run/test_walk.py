"""The walkthrough in docs/server.md: bash runs every command of it, in order, in an empty folder.

A ```bash block runs to its end; a ```bash server block runs until the next one or the next step begins, a ```bash
background block until the test ends. The output that the text quotes must appear in the block's output.
"""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support.lent import lend
from tests.support.ports import free_port
from tests.support.waiting import until

PAGE = Path(__file__).parents[3] / "docs" / "server.md"
BLOCK = re.compile(r"^```bash(| server| background)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
STEP = re.compile(r"^\*\*\d\. ", re.MULTILINE)
PRINTS = re.compile(r"# prints (.*)$", re.MULTILINE)
PORT = "1025"
READY = {"server": "Daemon start success!", "background": "serving"}
LIMIT_S = 120.0


def steps() -> list[list[tuple[str, str]]]:
    """(kind, text) of the blocks of each step."""
    section = PAGE.read_text().partition("## From nothing to a fleet of one\n")[2].partition("\n## ")[0]
    found = [[(kind.strip(), text) for kind, text in BLOCK.findall(step)] for step in STEP.split(section)]
    assert sum(map(len, found)) == section.count("```") // 2, "every block of the walk is run"
    assert len(found) == 10
    return found


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A new user's environment: only the commands on PATH, and a pool socket that no other test uses."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MIES_", "EMS_", "OTEL_"))}
    commands = tmp_path / "bin"
    commands.mkdir()
    lend(commands / "kvloom", "-m", "kvloom.cli")
    path = f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**kept, "PATH": path, "EMS_SOCKET": str(tmp_path / "ems.sock")}


@pytest.mark.real
@pytest.mark.timeout(400)
def test_every_command_of_the_walk_does_what_the_page_says(
    tmp_path: Path, environment: dict[str, str], smollm2_path: Path
):
    folder, port = tmp_path / "walk", str(free_port())
    folder.mkdir()
    with ExitStack() as to_the_end:
        for step in steps():
            with ExitStack() as server:
                for kind, text in step:
                    command = text.replace(PORT, port)
                    if kind == "":
                        run(command, folder, environment)
                        use_port(folder, port)
                        continue
                    command = re.sub(r"kvloom serve(?! --config)", f"kvloom serve --port {port}", command)
                    if kind == "server":
                        server.close()
                    stack = server if kind == "server" else to_the_end
                    stack.enter_context(running(kind, command, folder, environment))


def run(command: str, folder: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    for words in PRINTS.findall(command):
        assert words.strip() in done.stdout + done.stderr, f"{command}\n{done.stdout}\n{done.stderr}"


def use_port(folder: Path, port: str) -> None:
    """Replaces the page's port in files that commands have just written."""
    for path in (folder / "conf" / "config.json", folder / "tune" / "config.json"):
        if path.exists():
            path.write_text(path.read_text().replace(f'"port": {PORT}', f'"port": {port}'))


@contextmanager
def running(kind: str, command: str, folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """Runs a block in the background once it is ready, and ends it as Ctrl-C does."""
    process = subprocess.Popen(
        ["bash", "-c", f"exec {command}"], cwd=folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    lines: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(target=lambda: lines.extend(iter(process.stdout.readline, "")))
    reader.start()
    try:
        until(lambda: any(READY[kind] in line for line in lines) or process.poll() is not None, LIMIT_S)
        assert process.poll() is None, f"{command}\n{''.join(lines)}"
        yield
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(LIMIT_S)
        finally:
            process.kill()
            reader.join()
            process.stdout.close()
    assert process.returncode in (0, -signal.SIGINT, 130), f"{command}\n{''.join(lines)}"
