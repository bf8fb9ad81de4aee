"""`kvloom pool bench`: save and load against memcpy in the same run; JSON line and table.

The agent runs as a process of its own on a private socket; the client is this process, with plain bytes and the wire of
the SDK, so that no tensor library stands between the figures and the pool. Pages are touched before anything is timed.
"""

import contextlib
import mmap
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ems.common.channel import Channel
from ems.keys import NONCE_BYTES, proof, verifier
from ems.wire import messages as m
from kvloom.pool.bench_redis import RedisClient, find_server, private_server

Bytes = npt.NDArray[np.uint8]
SIZES = (16 << 10, 64 << 10, 256 << 10, 1 << 20)
NUM_KEYS = 64
_SUB_BATCH = 16
_DEADLINE_S = 30.0
_POOL_BATCHES = 4
_SEGMENT_BYTES = 64 << 20
_RING_BYTES = 192 << 20


def _new_keys() -> list[bytes]:
    return [secrets.token_bytes(32) for _ in range(NUM_KEYS)]


@dataclass(frozen=True, slots=True)
class Row:
    """GB/s (10**9 bytes) of batches of NUM_KEYS blocks, medians; ratios are to memcpy of the same bytes in this run."""

    block_bytes: int
    memcpy: float
    save: float
    load: float
    save_ratio: float
    load_ratio: float
    load_one_us: float  # one block, median
    exists_us: float  # NUM_KEYS keys, median
    redis_save: float | None  # Redis or Valkey over a socket, one put and get of all keys; None = not installed
    redis_load: float | None


class Client:
    """A bare connection to an open agent, with its staging area and the pool's segments mapped."""

    def __init__(self, path: Path, arena_bytes: int) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(str(path))
        self._channel = Channel(sock)
        nonce = secrets.token_bytes(NONCE_BYTES)
        challenge = self.call(m.Hello("", nonce))
        assert isinstance(challenge, m.Challenge)
        claim = proof(verifier("", challenge.salt), "client", "", nonce, challenge.nonce)
        welcome = self.call(m.Proof(claim))
        assert isinstance(welcome, m.Welcome)
        self._segment_bytes = welcome.segment_bytes
        self._segments: dict[int, Bytes] = {}
        self.arena = self._mapped(m.Arena(arena_bytes), arena_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
        self.arena[:] = 0

    def send(self, message: m.Message) -> None:
        self._channel.send(message, time.monotonic() + _DEADLINE_S, deadline_ms=int(_DEADLINE_S * 1000))

    def receive(self) -> m.Message:
        return self._channel.receive(time.monotonic() + _DEADLINE_S).message

    def call(self, message: m.Message) -> m.Message:
        self.send(message)
        return self.receive()

    def _mapped(self, message: m.Message, size: int, protection: int) -> Bytes:
        self.send(message)
        _frame, fd = self._channel.receive_with_fd(time.monotonic() + _DEADLINE_S)
        try:
            return np.frombuffer(mmap.mmap(fd, size, mmap.MAP_SHARED, protection), np.uint8)
        finally:
            os.close(fd)

    def save(self, keys: list[bytes], data: Bytes, size: int) -> None:
        """Saves blocks of `size` bytes as the SDK does: copies into the staging area while the agent works."""
        for start in range(0, len(keys), _SUB_BATCH):
            part = keys[start : start + _SUB_BATCH]
            offsets = [(start + i) * size for i in range(len(part))]
            for offset in offsets:
                self.arena[offset : offset + size] = data[offset : offset + size]
            is_last = start + len(part) == len(keys)
            self.send(m.Save(b"".join(part), offsets, [size] * len(part), b"", True, is_last))
        for _ in range(0, len(keys), _SUB_BATCH):
            answer = self.receive()
            assert isinstance(answer, m.Saved)
            assert not any(answer.statuses), "a block was not stored"

    def load(self, keys: list[bytes], target: Bytes, size: int) -> None:
        """Loads, verifies and copies the blocks; all must be there."""
        found = self.call(m.Load(b"".join(keys)))
        assert isinstance(found, m.Found)
        assert len(found.segments) == len(keys), "a block is missing"
        for i, (segment, offset) in enumerate(zip(found.segments, found.offsets, strict=True)):
            if segment not in self._segments:
                self._segments[segment] = self._mapped(m.Segment(segment), self._segment_bytes, mmap.PROT_READ)
            source = self._segments[segment][offset : offset + size]
            assert xxhash.xxh3_128_digest(source.data) == found.sums[16 * i : 16 * i + 16], "damaged"
            target[i * size : (i + 1) * size] = source
        self.send(m.Release(found.lease))

    def close(self) -> None:
        self._channel.close()


@contextlib.contextmanager
def private_agent(pool_bytes: int) -> Iterator[Path]:
    """An agent process with a warm pool; its socket. Raises RuntimeError when it does not start."""
    with tempfile.TemporaryDirectory(prefix="ems-bench-") as folder:
        path = Path(folder) / "ems.sock"
        command = [sys.executable, "-m", "kvloom.pool.agent", f"--socket={path}", f"--pool={pool_bytes}"]
        command += ["--ends-with-stdin", "--no-prefault"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                if b"serving" not in process.stdout.readline():
                    raise RuntimeError("the agent did not start")
                yield path
            finally:
                process.stdin.close()


def _time(call: Callable[[], object], rounds: int) -> float:
    """Median seconds of `call`."""
    took = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        took.append(time.perf_counter() - start)
    return median(took)


def measure(client: Client, redis: RedisClient | None, size: int, rounds: int, pool_bytes: int) -> Row:
    """One block size. Rounds of memcpy, save and load take turns, so that all see the same machine.

    Each call reads and writes memory that the calls just before it did not, so that no processor cache helps; the pool
    is full and evicts, as it does in use.
    """
    total = size * NUM_KEYS
    num_slices = max(3, _RING_BYTES // total)
    data = np.random.default_rng(size).integers(0, 256, num_slices * total, np.uint8).reshape(num_slices, total)
    target = np.zeros_like(data)
    for _ in range(pool_bytes // total + 1):  # the pool's pages and the mappings
        last = _new_keys()
        client.save(last, data[0], size)
        client.load(last, target[0], size)
        if redis is not None:
            redis.save(last, data[0], size)
            redis.load(last, target[0], size)
    times: dict[str, list[float]] = {"memcpy": [], "save": [], "load": [], "redis_save": [], "redis_load": []}
    for turn in range(rounds):
        copied, saved, loaded = ((3 * turn + i) % num_slices for i in range(3))
        last = _new_keys()
        times["memcpy"].append(_time(partial(np.copyto, target[copied], data[copied]), 1))
        times["save"].append(_time(partial(client.save, last, data[saved], size), 1))
        times["load"].append(_time(partial(client.load, last, target[loaded], size), 1))
        assert np.array_equal(target[loaded], data[saved]), "wrong bytes"
        if redis is not None:
            times["redis_save"].append(_time(partial(redis.save, last, data[copied], size), 1))
            times["redis_load"].append(_time(partial(redis.load, last, target[copied], size), 1))
    speeds = {name: total / median(took) / 1e9 for name, took in times.items() if took}
    one = _time(partial(client.load, last[:1], target[0], size), 50)
    exists = _time(partial(client.call, m.Exists(b"".join(last))), 50)
    return Row(
        block_bytes=size,
        memcpy=round(speeds["memcpy"], 2),
        save=round(speeds["save"], 2),
        load=round(speeds["load"], 2),
        save_ratio=round(speeds["save"] / speeds["memcpy"], 3),
        load_ratio=round(speeds["load"] / speeds["memcpy"], 3),
        load_one_us=round(one * 1e6, 1),
        exists_us=round(exists * 1e6, 1),
        redis_save=round(speeds["redis_save"], 2) if redis else None,
        redis_load=round(speeds["redis_load"], 2) if redis else None,
    )


def run(rounds: int = 15, sizes: tuple[int, ...] = SIZES) -> list[dict[str, Any]]:
    """Rows of all sizes, each as a dict of `Row`'s fields."""
    server = find_server()
    rows = []
    for size in sizes:
        total = size * NUM_KEYS
        pool_bytes = max(_SEGMENT_BYTES, _POOL_BATCHES * total)
        with contextlib.ExitStack() as stack:
            path = stack.enter_context(private_agent(pool_bytes))
            client = stack.enter_context(contextlib.closing(Client(path, total)))
            redis = None
            if server is not None:
                place = stack.enter_context(private_server(server, 2 * pool_bytes))
                redis = stack.enter_context(contextlib.closing(RedisClient(place)))
            rows.append(asdict(measure(client, redis, size, rounds, pool_bytes)))
    return rows
