"""The pool with and without its C++ libraries: `python -m benches.pool.native`.

Two agents and two clients, with the native libraries and without, take turns with memcpy of the same bytes to and from
memory as large as the pool: saves and loads of 64 blocks, one load, `exists` of 64. A JSON line a block size: ratios to
memcpy, microseconds of processor that a batch costs client and agent together, and short calls as multiples of a
message's round trip between threads. `possible`: the result of two processes that only exchange messages, copy and
checksum. The pools are full, so that no page is touched for the first time.
"""

import argparse
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean, median

import numpy as np
import psutil

from benches.pool.floor import Floor
from kvloom.pool.bench.agents import private_agent
from kvloom.pool.bench.baseline import ping_pong_us
from kvloom.pool.bench.sdk import SdkClient

NUM_KEYS, SLICES, CALLS = 64, 8, 5


def pool_bytes(block_bytes: int) -> int:
    """The size of each pool."""
    return max(64 << 20, 4 * NUM_KEYS * block_bytes)


class Side:
    """An agent and a client of one kind, and the times of its calls: wall and processor seconds by name."""

    def __init__(self, stack: contextlib.ExitStack, block_bytes: int, is_native: bool) -> None:
        os.environ["EMS_NATIVE"] = "1" if is_native else "0"
        before = set(psutil.Process().children())
        path: Path = stack.enter_context(private_agent(pool_bytes(block_bytes)))
        (self._agent,) = set(psutil.Process().children()) - before
        self.client = stack.enter_context(contextlib.closing(SdkClient(path, block_bytes, NUM_KEYS, SLICES)))
        self.took: dict[str, list[tuple[float, float]]] = {}
        for number in range(pool_bytes(block_bytes) // (NUM_KEYS * block_bytes) + 1):
            self.client.save(number % SLICES, self.client.new_hashes())

    def _processor_s(self) -> float:
        theirs = self._agent.cpu_times()
        return time.process_time() + theirs.user + theirs.system

    def timed(self, name: str, call: Callable[[], object], times: int = 1) -> None:
        """Run `call` some times; record the seconds of one call as an entry, for medians."""
        cpu_s, start_s = self._processor_s(), time.perf_counter()
        for _ in range(times):
            call()
        wall_s = time.perf_counter() - start_s
        self.took.setdefault(name, []).append((wall_s / times, (self._processor_s() - cpu_s) / times))

    def turn(self, number: int) -> None:
        """Run some calls of each kind."""
        client = self.client
        for call in range(CALLS):
            hashes, part = client.new_hashes(), number + 2 * call
            self.timed("save", lambda hashes=hashes, part=part: client.save(part % SLICES, hashes))
            self.timed("load", lambda hashes=hashes, part=part: client.load((part + 1) % SLICES, hashes))
        self.timed("load_one", lambda: client.load(0, hashes[:1]), CALLS)
        self.timed("exists", lambda: client.caching.exists(hashes), CALLS)


def measure(block_bytes: int, rounds: int) -> dict[str, object]:
    """One line of the output."""
    least: dict[str, list[float]] = {"save": [], "load": [], "load_one": [], "exists": []}
    with contextlib.ExitStack() as stack:
        floor = stack.enter_context(contextlib.closing(Floor(block_bytes, NUM_KEYS, pool_bytes(block_bytes))))
        sides = {name: Side(stack, block_bytes, name == "native") for name in ("native", "python")}
        ring = sides["native"].client
        far = np.ones((pool_bytes(block_bytes) // (NUM_KEYS * block_bytes), NUM_KEYS * block_bytes), np.uint8)
        copies: list[float] = []
        for number in range(-2, rounds):
            for part in range(CALLS):
                source, target = ring.slice(part), ring.slice((part + 1) % SLICES)
                turn = CALLS * number + part
                to, back = far[turn % len(far)], far[(turn + len(far) // 2) % len(far)]
                copies.append(_seconds(lambda source=source, to=to: np.copyto(to, source)))
                copies.append(_seconds(lambda target=target, back=back: np.copyto(target, back)))
                least["save"].append(_seconds(lambda source=source: floor.save(source)))
                least["load"].append(_seconds(lambda target=target: floor.load(target, NUM_KEYS)))
                least["load_one"].append(_seconds(lambda target=target: floor.load(target, 1)))
                least["exists"].append(_seconds(lambda target=target: floor.load(target, 0)))
            for side in sides.values():
                side.turn(number % SLICES)
        ping_s = ping_pong_us(200) / 1e6
        row: dict[str, object] = {"block_bytes": block_bytes, "memcpy_gb_s": _gb_s(block_bytes, median(copies))}
        row["possible"] = _ratios({what: median(each) for what, each in least.items()}, median(copies), ping_s)
        for name, side in sides.items():
            wall = {what: median(each[0] for each in took[len(took) // 5 :]) for what, took in side.took.items()}
            used = {what: mean(each[1] for each in took) for what, took in side.took.items()}
            row[name] = _ratios(wall, median(copies), ping_s) | {
                "save_cpu_us": round(used["save"] * 1e6),
                "load_cpu_us": round(used["load"] * 1e6),
            }
        return row


def _ratios(wall_s: dict[str, float], memcpy_s: float, ping_s: float) -> dict[str, float]:
    return {
        "save": round(memcpy_s / wall_s["save"], 3),
        "load": round(memcpy_s / wall_s["load"], 3),
        "load_one_to_ping": round(wall_s["load_one"] / ping_s, 1),
        "exists_to_ping": round(wall_s["exists"] / ping_s, 1),
    }


def _seconds(call: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def _gb_s(block_bytes: int, took_s: float) -> float:
    return round(block_bytes * NUM_KEYS / took_s / 1e9, 2)


def lines(arguments: list[str] | None = None) -> Iterator[str]:
    """A JSON line a block size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16 << 10, 64 << 10, 1 << 20], help="bytes")
    options = parser.parse_args(arguments)
    for size in options.sizes:
        yield json.dumps({"bench": "pool_native", **measure(size, options.rounds)})


if __name__ == "__main__":
    for line in lines():
        print(line, flush=True)
