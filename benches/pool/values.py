"""Values under keys, compared with Redis and memcpy: `python -m benches.pool.values`.

`KvPool` on an agent of its own and, where it is installed, a Redis or Valkey server on a Unix socket take turns with
memcpy of the same bytes: put, get and exists of 1 and of 64 values. A JSON line a size and batch: medians in
microseconds a call, and their ratios. Every call touches memory that was not just used. The stores are full, so that
no page of theirs is touched for the first time.
"""

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ems import CcConfig, EmsConfig
from ems.values.moving import KvStatus
from ems.values.pool import KvPool
from kvloom.pool.bench.agents import private_agent
from kvloom.pool.bench.redis import RedisClient, find_server, private_server

Bytes = npt.NDArray[np.uint8]
SLICES = 8
POOL_BYTES = 512 << 20


class Store(Protocol):
    """A measured store. The numbers of keys and pieces are the batch size."""

    def put(self, keys: list[bytes], pieces: list[Bytes]) -> None: ...

    def get(self, keys: list[bytes], pieces: list[Bytes]) -> None: ...

    def exists(self, keys: list[bytes], size: int) -> None: ...


class Ems:
    """The pool through the SDK."""

    def __init__(self, path: Path) -> None:
        config = EmsConfig(cc_config=CcConfig(rank_id=0, device_id=0, model_id="bench"))
        self.pool = KvPool(config, "bench", lambda _deadline_s: path)

    def close(self) -> None:
        self.pool.close()

    def put(self, keys: list[bytes], pieces: list[Bytes]) -> None:
        assert set(self.pool.put(keys, pieces)) == {KvStatus.STORED}, "a value was not stored"

    def get(self, keys: list[bytes], pieces: list[Bytes]) -> None:
        assert all(self.pool.get(keys, pieces)), "a value is missing"

    def exists(self, keys: list[bytes], size: int) -> None:
        assert all(self.pool.exists(keys, [size] * len(keys))), "a value is missing"


class Redis(RedisClient):
    """MSET, MGET and EXISTS; the pieces lie one after the other in memory."""

    def put(self, keys: list[bytes], pieces: list[Bytes]) -> None:
        self.save(keys, _joined(pieces), len(pieces[0]))

    def get(self, keys: list[bytes], pieces: list[Bytes]) -> None:
        self.load(keys, _joined(pieces), len(pieces[0]))

    def exists(self, keys: list[bytes], size: int) -> None:
        self._sock.sendall(
            b"*%d\r\n$6\r\nEXISTS\r\n" % (1 + len(keys)) + b"".join(b"$%d\r\n%b\r\n" % (len(key), key) for key in keys)
        )
        answer = b":%d\r\n" % len(keys)
        assert self._receive(len(answer)).tobytes() == answer, "a value is missing"


def _joined(pieces: list[Bytes]) -> Bytes:
    """The contiguous memory of the pieces."""
    size = len(pieces[0])
    return np.lib.stride_tricks.as_strided(pieces[0], (len(pieces) * size,), (1,))


class Turns:
    """Memory to put from and to get into, and the seconds of each call, by store and call."""

    def __init__(self, size: int, batch: int) -> None:
        self._size, self._batch, self._turn = size, batch, 0
        self._memory = np.random.default_rng(1).integers(0, 256, (SLICES, batch * size), np.uint8)
        self.took: dict[tuple[str, str], list[float]] = {}

    def _pieces(self, turn: int) -> list[Bytes]:
        return list(self._memory[turn % SLICES].reshape(self._batch, self._size))

    def _timed(self, store: str, name: str, call: Callable[[], object]) -> None:
        start_s = time.perf_counter()
        call()
        self.took.setdefault((store, name), []).append(time.perf_counter() - start_s)

    def copy(self) -> None:
        """memcpy of a batch."""
        self._turn += 1
        target, source = self._memory[self._turn % SLICES], self._memory[(self._turn + SLICES // 2) % SLICES]
        self._timed("memcpy", "copy", lambda: np.copyto(target, source))

    def use(self, name: str, store: Store) -> None:
        """Run one call of each kind on new keys."""
        self._turn += 1
        turn = self._turn
        keys = [b"%d:%d:%d:%d" % (self._size, self._batch, turn, i) for i in range(self._batch)]
        self._timed(name, "put", lambda: store.put(keys, self._pieces(turn)))
        self._timed(name, "get", lambda: store.get(keys, self._pieces(turn + SLICES // 2)))
        self._timed(name, "exists", lambda: store.exists(keys, self._size))

    def fill(self, store: Store) -> None:
        """Fill the store, so that later calls touch none of its memory for the first time."""
        for number in range(POOL_BYTES // (self._batch * self._size) + 1):
            store.put([b"fill:%d:%d" % (number, i) for i in range(self._batch)], self._pieces(number))

    def median_us(self, store: str, name: str) -> float:
        """The median without the first fifth of the calls, in which memory is touched for the first time."""
        took = self.took[store, name]
        return median(took[len(took) // 5 :]) * 1e6


def measure(stores: dict[str, Store], size: int, batch: int, rounds: int) -> dict[str, object]:
    """One line of the output."""
    turns = Turns(size, batch)
    for _ in range(rounds):
        turns.copy()
        for name, store in stores.items():
            turns.use(name, store)
    copy_us = turns.median_us("memcpy", "copy")
    row: dict[str, object] = {"bytes": size, "batch": batch, "memcpy_us": round(copy_us, 1)}
    for name in stores:
        calls = {call: turns.median_us(name, call) for call in ("put", "get", "exists")}
        row[name] = {f"{call}_us": round(took) for call, took in calls.items()}
        row[f"memcpy_to_{name}"] = {call: round(copy_us / calls[call], 3) for call in ("put", "get")}
        if name != "ems":
            row[f"ems_faster_than_{name}"] = {
                call: round(took / turns.median_us("ems", call), 2) for call, took in calls.items()
            }
    return row


def lines(arguments: list[str] | None = None) -> Iterator[str]:
    """A JSON line a size and batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    options = parser.parse_args(arguments)
    with contextlib.ExitStack() as stack:
        ems = Ems(stack.enter_context(private_agent(POOL_BYTES)))
        stores: dict[str, Store] = {"ems": ems}
        stack.callback(ems.close)
        command = find_server()
        if command is not None:
            redis = Redis(stack.enter_context(private_server(command, POOL_BYTES)))
            stores[Path(command).name.removesuffix("-server")] = redis
            stack.callback(redis.close)
        for store in stores.values():
            Turns(1 << 20, 16).fill(store)
        for size in options.sizes:
            for batch in options.batches:
                rounds = min(options.rounds, max(10, (options.rounds * (4 << 20)) // (size * batch)))
                yield json.dumps({"bench": "pool_values", **measure(stores, size, batch, rounds)})


if __name__ == "__main__":
    for line in lines():
        print(line, flush=True)
