"""The cost of loads from another node: `python -m benches.pool.nodes`.

Pairs of agents on loopback take turns with streams of the same bytes, over plain TCP and inside TLS by Python's `ssl`,
which are not checksummed, kept or copied: with the C++ libraries and without, in plain text and inside TLS,
over one, two and four connections; and with three bare processes that do only the indispensable work of a load (`bare`,
`tls_bare`). 64 blocks a load. A JSON line a block size: ratios to the plain stream and, inside TLS, to the one inside
TLS, and nanoseconds of processor a byte that the loading node, the node loaded from and the client take.
"""

import argparse
import contextlib
import json
import os
import time
from collections.abc import Iterator
from statistics import mean, median

import numpy as np
import psutil

from benches.pool.nodes_floor import BareNodes
from kvloom.pool.bench.agents import two_nodes
from kvloom.pool.bench.baseline import TcpStream, TlsStream
from kvloom.pool.bench.sdk import SdkClient

NUM_KEYS, SLICES, CALLS = 64, 4, 3
PAIRS = {  # whether native, whether inside TLS, connections
    "python": (False, False, 1),
    "native": (True, False, 1),
    "native_2": (True, False, 2),
    "tls_python": (False, True, 1),
    "tls": (True, True, 1),
    "tls_2": (True, True, 2),
    "tls_4": (True, True, 4),
}
BARE = {"bare": False, "tls_bare": True}  # whether inside TLS
_Took = list[tuple[float, list[float]]]  # wall seconds of a load; processor seconds of agent a, agent b, client


class Pair:
    """Two agents, a client of each, and the times of loads."""

    def __init__(self, stack: contextlib.ExitStack, name: str, block_bytes: int) -> None:
        is_native, is_encrypted, connections = PAIRS[name]
        os.environ["EMS_NATIVE"] = "1" if is_native else "0"
        before = set(psutil.Process().children())
        pool_bytes = max(64 << 20, 4 * NUM_KEYS * block_bytes)
        paths = stack.enter_context(two_nodes(pool_bytes, is_encrypted, f"--peer-connections={connections}"))
        agents = set(psutil.Process().children()) - before
        self._agents = sorted(agents, key=lambda agent: "--node-id=b" in agent.cmdline())
        self._clients = [
            stack.enter_context(contextlib.closing(SdkClient(path, block_bytes, NUM_KEYS, SLICES))) for path in paths
        ]
        self.took: _Took = []

    def _processor_s(self) -> list[float]:
        times = [agent.cpu_times() for agent in self._agents]
        return [*(each.user + each.system for each in times), time.process_time()]

    def turn(self, number: int) -> None:
        """Run some loads of new blocks. Processor times come in hundredths of a second, so only their sum is used."""
        here, there = self._clients
        for call in range(CALLS):
            hashes = there.hashes_at("b", ("a", "b"))
            there.save((number + call) % SLICES, hashes)
            before, start_s = self._processor_s(), time.perf_counter()
            here.load(number % SLICES, hashes)
            wall_s = time.perf_counter() - start_s
            self.took.append((wall_s, [now - then for now, then in zip(self._processor_s(), before, strict=True)]))


class Bare:
    """The three bare processes, with the interface of a Pair."""

    def __init__(self, stack: contextlib.ExitStack, name: str, block_bytes: int) -> None:
        total = block_bytes * NUM_KEYS
        self._nodes = stack.enter_context(contextlib.closing(BareNodes(total, block_bytes, SLICES, BARE[name])))
        self._targets = np.ones((SLICES, total), np.uint8)  # touches all pages
        self.took: _Took = []

    def turn(self, number: int) -> None:
        """Run some loads."""
        for _ in range(CALLS):
            before, start_s = self._nodes.processor_s(), time.perf_counter()
            self._nodes.load(self._targets[number % SLICES])
            wall_s = time.perf_counter() - start_s
            self.took.append(
                (wall_s, [now - then for now, then in zip(self._nodes.processor_s(), before, strict=True)])
            )


def measure(block_bytes: int, rounds: int, names: list[str]) -> dict[str, object]:
    """One line of the output."""
    total = block_bytes * NUM_KEYS
    with contextlib.ExitStack() as stack:
        pairs: dict[str, Pair | Bare] = {name: Bare(stack, name, block_bytes) for name in names if name in BARE}
        pairs |= {name: Pair(stack, name, block_bytes) for name in names if name in PAIRS}
        streams = [stack.enter_context(contextlib.closing(kind(total, block_bytes))) for kind in (TcpStream, TlsStream)]
        received, streamed = np.zeros(total, np.uint8), list[list[float]]([[], []])
        for number in range(rounds + 2):
            for stream, times in zip(streams, streamed, strict=True):
                for _ in range(CALLS):
                    start_s = time.perf_counter()
                    stream.receive(received)
                    times.append(time.perf_counter() - start_s)
            for pair in pairs.values():
                pair.turn(number)
    tcp_s, tls_s = (median(times[2 * CALLS :]) for times in streamed)
    row: dict[str, object] = {"block_bytes": block_bytes, "tcp_gb_s": round(total / tcp_s / 1e9, 2)}
    row["tls_stream_to_tcp"] = round(tcp_s / tls_s, 2)
    for name, pair in pairs.items():
        took = pair.took[2 * CALLS :]
        used = [round(mean(parts[i] for _wall_s, parts in took) / total * 1e9, 3) for i in range(3)]
        load_s = median(wall_s for wall_s, _parts in took)
        ratios = {"to_tcp": round(tcp_s / load_s, 2)}
        if name.startswith("tls"):
            ratios["to_tls"] = round(tls_s / load_s, 2)
        row[name] = {**ratios, "cpu_ns": dict(zip(("here", "there", "client"), used, strict=True))}
    return row


def lines(arguments: list[str] | None = None) -> Iterator[str]:
    """A JSON line a block size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64 << 10, 1 << 20], help="bytes")
    parser.add_argument("--pairs", nargs="+", choices=[*BARE, *PAIRS], default=[*BARE, *PAIRS])
    options = parser.parse_args(arguments)
    for size in options.sizes:
        yield json.dumps({"bench": "pool_nodes", **measure(size, options.rounds, options.pairs)})


if __name__ == "__main__":
    for line in lines():
        print(line, flush=True)
