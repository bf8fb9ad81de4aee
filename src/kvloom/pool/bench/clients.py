"""Several ranks on one agent at once, each a process of its own."""

import multiprocessing
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from kvloom.pool.bench.places import private_agent
from kvloom.pool.bench.sdk import SdkClient

BLOCK_BYTES = 64 << 10
NUM_KEYS = 64
_NUM_SLICES = 8
_POOL_BYTES = 256 << 20
_START_S = 120.0


def _work(path: Path, rounds: int, barrier: Barrier, results: "multiprocessing.Queue[list[float]]") -> None:
    client = SdkClient(path, BLOCK_BYTES, NUM_KEYS, _NUM_SLICES)
    took = []
    for number in range(-_NUM_SLICES, rounds):
        if number == 0:
            barrier.wait(_START_S)
        hashes = client.new_hashes()
        start_s = time.perf_counter()
        client.save(2 * number % _NUM_SLICES, hashes)
        client.load((2 * number + 1) % _NUM_SLICES, hashes)
        if number >= 0:
            took.append(time.perf_counter() - start_s)
    client.close()
    results.put(took)


def measure(num_clients: int, rounds: int) -> dict[str, Any]:
    """Saves and loads of all clients together in GB/s, and how much slower the slowest calls are than the usual one.

    A call is the save and the load of NUM_KEYS blocks of BLOCK_BYTES.
    """
    context = multiprocessing.get_context("spawn")
    with private_agent(_POOL_BYTES) as path:
        barrier, results = context.Barrier(num_clients + 1), context.Queue()
        workers = [context.Process(target=_work, args=(path, rounds, barrier, results)) for _ in range(num_clients)]
        for worker in workers:
            worker.start()
        try:
            barrier.wait(_START_S)
            start_s = time.perf_counter()
            took = sorted(each for _ in workers for each in results.get(timeout=_START_S))
            wall_s = time.perf_counter() - start_s
        finally:
            for worker in workers:
                worker.kill() if worker.exitcode is None and barrier.broken else worker.join(_START_S)
    p50, p99 = took[len(took) // 2], took[min(len(took) - 1, len(took) * 99 // 100)]
    return {
        "clients": num_clients,
        "block_bytes": BLOCK_BYTES,
        "save_and_load": round(2 * len(took) * NUM_KEYS * BLOCK_BYTES / wall_s / 1e9, 2),
        "p50_ms": round(p50 * 1e3, 2),
        "p99_ms": round(p99 * 1e3, 2),
        "p99_to_p50": round(p99 / p50, 1),
    }
