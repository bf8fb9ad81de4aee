"""Several ranks on one agent at once, each a process of its own."""

import multiprocessing
import os
import socket
import struct
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from kvloom.pool.bench.agents import private_agent
from kvloom.pool.bench.sdk import SdkClient

BLOCK_BYTES = 64 << 10
NUM_KEYS = 64
_NUM_SLICES = 8
_POOL_BYTES = 256 << 20  # or two batches of each client
_START_S = 120.0
_LOOK_S = 0.02
_UCRED = struct.Struct("3i")  # process, user, group of the peer


Result = tuple[list[float], int, float]  # seconds of each call, blocks found by all loads, CPU seconds


def _work(path: Path, rounds: int, barrier: Barrier, results: "multiprocessing.Queue[Result]") -> None:
    client = SdkClient(path, BLOCK_BYTES, NUM_KEYS, _NUM_SLICES)
    took, num_found, cpu_s = [], 0, 0.0
    for number in range(-_NUM_SLICES, rounds):
        if number == 0:
            barrier.wait(_START_S)
            cpu_s = time.process_time()
        hashes = client.new_hashes()
        start_s = time.perf_counter()
        client.save(2 * number % _NUM_SLICES, hashes)
        found = client.try_load((2 * number + 1) % _NUM_SLICES, hashes)
        if number >= 0:
            took.append(time.perf_counter() - start_s)
            num_found += found
    cpu_s = time.process_time() - cpu_s
    client.close()
    results.put((took, num_found, cpu_s))


def _wait(barrier: Barrier, workers: Sequence[BaseProcess]) -> None:
    """Until all clients are ready. Raises RuntimeError when one of them ended."""
    end_s = time.monotonic() + _START_S
    while barrier.n_waiting < len(workers):
        if any(worker.exitcode is not None for worker in workers) or time.monotonic() > end_s:
            barrier.abort()
            raise RuntimeError("a client did not get ready")
        time.sleep(_LOOK_S)
    barrier.wait(_START_S)


def _agents_s(path: Path) -> float:
    """Seconds of the processor that the agent at that socket has used."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(path))
        pid, _user, _group = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def measure(num_clients: int, rounds: int) -> dict[str, Any]:
    """Throughput of all clients' saves and loads together in GB/s, and how much slower the slowest calls are than the
    median.

    A call is the save and the load of NUM_KEYS blocks of BLOCK_BYTES. found: share of blocks still there when their
    writer loads them; a full pool evicts blocks while others write. gb_a_processor_s: GB saved and loaded per CPU
    second, of clients and agent together.
    """
    context = multiprocessing.get_context("forkserver")  # it has imported what each of many would take a second for
    context.set_forkserver_preload([__name__])
    with private_agent(max(_POOL_BYTES, 2 * num_clients * NUM_KEYS * BLOCK_BYTES)) as path:
        barrier, results = context.Barrier(num_clients + 1), context.Queue()
        workers = [context.Process(target=_work, args=(path, rounds, barrier, results)) for _ in range(num_clients)]
        for worker in workers:
            worker.start()
        try:
            _wait(barrier, workers)
            start_s, agent_s = time.perf_counter(), _agents_s(path)
            done: list[Result] = [results.get(timeout=_START_S) for _ in workers]
            wall_s = time.perf_counter() - start_s
            cpu_s = _agents_s(path) - agent_s + sum(each for _calls, _found, each in done)
        finally:
            for worker in workers:
                worker.join(1)
                worker.kill()
    took = sorted(each for calls, _found, _cpu_s in done for each in calls)
    num_blocks, num_found = len(took) * NUM_KEYS, sum(found for _calls, found, _cpu_s in done)
    moved_gb = (num_blocks + num_found) * BLOCK_BYTES / 1e9
    p50, p99 = took[len(took) // 2], took[min(len(took) - 1, len(took) * 99 // 100)]
    return {
        "clients": num_clients,
        "block_bytes": BLOCK_BYTES,
        "save_and_load": round(moved_gb / wall_s, 2),
        "gb_a_processor_s": round(moved_gb / cpu_s, 2),
        "found": round(num_found / num_blocks, 3),
        "p50_ms": round(p50 * 1e3, 2),
        "p99_ms": round(p99 * 1e3, 2),
        "p99_to_p50": round(p99 / p50, 1),
    }
