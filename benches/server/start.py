"""The time to the first answer: of the server, of a cold Gewu model, of a fresh installation.

`python -m benches.server.start [--against SRC] [--rounds N] [--install]` prints JSON lines. SRC is the src folder of
another checkout, whose starts are measured in turns with this one's; --install makes a new environment of this
checkout, as `make serve` does, from pip's cache.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
from tests.support.ports import free_port
from tests.support.waiting import until

from kvloom.checkpoints.demo_models import find_model
from kvloom.net.listening import is_serving
from kvloom.processes.inside import signal_at_end_of_thread

ROOT = Path(__file__).resolve().parent.parent.parent
MODEL = "smollm2"
LIMIT_S = 120.0
INSTALL_LIMIT_S = 900.0  # packages, kernels and a model, on a busy machine
ASK = {"model": MODEL, "prompt": "The sea is", "max_tokens": 1, "temperature": 0}
CLIENT = """
import sys, time
from kvloom.gewu import Session
from kvloom.gewu.build import library
library()
began_s = time.perf_counter()
with Session(sys.argv[1]) as session:
    next(iter(session.stream([{"role": "user", "content": "hi"}], max_tokens=4)))
    print(time.perf_counter() - began_s)
"""


def emit(state: str, name: str, times_s: list[float]) -> None:
    """Print the median of all rounds, and the time of each."""
    line = {"bench": "start", "state": state, "name": name, "value": round(statistics.median(times_s), 3), "unit": "s"}
    print(json.dumps({**line, "all": [round(each, 3) for each in times_s]}), flush=True)


def environment(source: Path, cache: Path) -> dict[str, str]:
    """The environment of a process of that checkout, with its cache of packed weights below `cache`."""
    return {**os.environ, "PYTHONPATH": str(source), "KVLOOM_WEIGHT_CACHE": str(cache / "packed")}


@contextlib.contextmanager
def process(command: list[str], environ: Mapping[str, str], folder: Path = ROOT) -> Iterator["subprocess.Popen[bytes]"]:
    """A program in a process group of its own, which ends with it."""
    started = subprocess.Popen(
        command,
        env=environ,
        stdout=subprocess.DEVNULL,
        cwd=folder,
        preexec_fn=signal_at_end_of_thread,
        process_group=0,
    )
    try:
        yield started
    finally:
        os.killpg(started.pid, signal.SIGTERM)
        started.wait()


def serve(environ: Mapping[str, str], kept: Path | None = None) -> float:
    """The time from the command to the complete first answer. With `kept`, wait then for weights in that folder."""
    port = str(free_port())
    began_s = time.perf_counter()
    with process([sys.executable, "-m", "kvloom.cli", "serve", MODEL, "--port", port], environ):
        until(lambda: is_answered(port), LIMIT_S)
        spent_s = time.perf_counter() - began_s
        if kept is not None:
            until(lambda: any(kept.glob("*.packed")), LIMIT_S)
    return spent_s


def is_answered(port: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        url = f"http://127.0.0.1:{port}/v1/completions"
        return httpx.post(url, json=ASK, timeout=LIMIT_S, trust_env=False).status_code == 200
    return False


def cold_reply(environ: Mapping[str, str], folder: Path) -> float:
    """The time from Create on an unloaded model to the first piece of the reply; the daemon runs already."""
    path = folder / "gewu.sock"
    both = {**environ, "GEWU_SOCKET": str(path)}
    with process([sys.executable, "-m", "kvloom.cli", "gewu", "daemon"], both):
        until(lambda: is_serving(path), LIMIT_S)
        command = [sys.executable, "-c", CLIENT, str(find_model(MODEL))]
        return float(subprocess.run(command, env=both, capture_output=True, check=True).stdout)


def install(rounds: int) -> None:
    """The time from `make serve` in a new checkout to the first answer, and that of `pip install` of the same packages
    alone, in turns: both have pip's cache, and neither a compiled kernel nor a fetched model.
    """
    packages_s, answer_s = [], []
    for _ in range(rounds):
        with checkout() as copy:
            packages_s.append(timed(["make", "install", "UV=", "PREPARE=true"], copy))
        with checkout() as copy:
            answer_s.append(first_answer_s(copy))
            held = subprocess.run(["du", "-sm", ".venv"], cwd=copy, capture_output=True, check=True, text=True)
    emit("now", "packages", packages_s)
    emit("now", "make_serve_to_first_answer", answer_s)
    ratio = statistics.median(answer / alone for answer, alone in zip(answer_s, packages_s, strict=True))
    line = {"bench": "start", "state": "now", "name": "make_serve_to_packages", "value": round(ratio, 2), "unit": ""}
    print(json.dumps(line), flush=True)
    size = {"bench": "start", "state": "now", "name": "environment", "value": int(held.stdout.split()[0]), "unit": "MB"}
    print(json.dumps(size), flush=True)


@contextlib.contextmanager
def checkout() -> Iterator[Path]:
    """A copy of what git knows of this checkout."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / "kvloom"
        files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True)
        for file in filter(None, files.stdout.split("\0")):
            (copy / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, copy / file)
        yield copy


def timed(command: list[str], copy: Path) -> float:
    began_s = time.perf_counter()
    subprocess.run(command, cwd=copy, check=True, stdout=subprocess.DEVNULL, env=bare(copy))
    return time.perf_counter() - began_s


def bare(copy: Path) -> dict[str, str]:
    """The environment of a user whose cache holds pip's files alone."""
    pip = os.environ.get("PIP_CACHE_DIR") or str(Path.home() / ".cache" / "pip")
    return {**os.environ, "XDG_CACHE_HOME": str(copy.parent / "cache"), "PIP_CACHE_DIR": pip}


def first_answer_s(copy: Path) -> float:
    port = str(free_port())
    began_s = time.perf_counter()
    with process(["make", "serve", "UV=", f"SERVE=--port {port}"], bare(copy), copy):
        until(lambda: is_answered(port), INSTALL_LIMIT_S)
        return time.perf_counter() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="SRC", help="src folder of another checkout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--install", action="store_true", help="make a new environment, too")
    given = parser.parse_args()
    states = {"now": ROOT / "src"} | ({"before": given.against.resolve()} if given.against else {})
    times: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folders = {state: Path(name) / state for state in states}
        for state, source in states.items():
            folders[state].mkdir()
            environ = environment(source, folders[state])
            emit(state, "serve_first_start", [serve(environ, folders[state] / "packed" if state == "now" else None)])
            cold_reply(environ, folders[state])
        for _ in range(given.rounds):
            for state, source in states.items():
                environ = environment(source, folders[state])
                times.setdefault((state, "serve_to_first_answer"), []).append(serve(environ))
                times.setdefault((state, "gewu_cold_reply"), []).append(cold_reply(environ, folders[state]))
    for (state, bench), found in times.items():
        emit(state, bench, found)
    if given.install:
        install(given.rounds)


if __name__ == "__main__":
    main()
