"""`kvloom serve` as a user starts it: a process, a free port, its output."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from tests.support.forks import is_template
from tests.support.waiting import WAIT_S, until

CLI = (sys.executable, "-m", "kvloom.cli")
READY = re.compile(r"(?:is|are) served on (https?://\S+:\d+)\.")


def facts_of(pid: int, *names: str) -> list[dict[str, Any]]:
    """What psutil tells of a process and its descendants, without those that end meanwhile; None for facts that a
    process which has ended has no more.
    """
    parent, found = psutil.Process(pid), []
    for process in (parent, *parent.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            found.append(process.as_dict(names))
    return found


@dataclass(slots=True)
class ServeProcess:
    process: subprocess.Popen[str]
    url: str = ""
    lines: list[str] = field(default_factory=list)

    def rank_pid(self) -> int:
        """The model process: the only child of the server."""
        with open(f"/proc/{self.process.pid}/task/{self.process.pid}/children") as file:
            children = file.read().split()
        for task in os.listdir(f"/proc/{self.process.pid}/task"):
            with open(f"/proc/{self.process.pid}/task/{task}/children") as file:
                children += file.read().split()
        return next(pid for pid in map(int, children) if not is_template(pid))

    def num_restarts(self) -> int:
        """Restarts of the model process since the server began; polling the process itself could miss a short
        restart.
        """
        text = httpx.get(f"{self.url}/metrics", timeout=120).text
        return sum(int(float(count)) for count in re.findall(r"^model_restarts_total\S* (\S+)$", text, re.MULTILINE))

    def stop(self, limit_s: float = WAIT_S) -> None:
        """Stops it as a user would, so that its child processes end with it."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(limit_s)

    def read_output(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            found = READY.search(line)
            if found:
                self.url = found[1]


@contextmanager
def serve(*arguments: str, limit_s: float = WAIT_S) -> Iterator[ServeProcess]:
    """Runs `kvloom serve` until it prints its address; killed at the end."""
    with serving([*CLI, "serve", "--port", "0", *arguments], limit_s) as running:
        yield running


@contextmanager
def serving(command: Sequence[str], limit_s: float = WAIT_S, **environment: str) -> Iterator[ServeProcess]:
    """Any command that starts a server."""
    both = {**os.environ, **environment}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=both)
    running = ServeProcess(process)
    reader = threading.Thread(target=running.read_output, daemon=True)
    reader.start()
    try:
        until(lambda: bool(running.url) or process.poll() is not None, limit_s)
        if not running.url:  # it has ended; its output may still be on the way
            reader.join(limit_s)
        assert running.url, "\n".join(running.lines)
        yield running
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        reader.join()
        assert process.stdout is not None
        process.stdout.close()
