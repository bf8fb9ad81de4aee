"""One block size: every column in rounds that take turns, so that all are measured under the same conditions."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from kvloom.pool.bench import mooncake, redis
from kvloom.pool.bench.agents import private_agent, two_nodes
from kvloom.pool.bench.baseline import TcpStream, copy_blocks, ping_pong_us
from kvloom.pool.bench.sdk import SdkClient

SIZES = (16 << 10, 64 << 10, 256 << 10, 1 << 20)
FRAGMENTED = (2 << 20, 64)  # a block of 32 layers, K and V, 32 KiB each
NUM_KEYS = 64
_POOL_BATCHES = 4
_SEGMENT_BYTES = 64 << 20
_RING_BYTES = 192 << 20  # more than the processor's caches, so that each call touches memory that was not used recently
_MIN_SLICES = 6
_SHORT_CALLS = 50
_CALLS = 5  # of one column in one turn: a stream of batches is measured, not the first one
_COMPARED = (
    ("remote_load", "tcp"),
    ("remote_tls_load", "remote_load"),
    ("save", "redis_save"),
    ("direct_save", "redis_save"),
    ("load", "redis_load"),
    ("save", "mooncake_save"),
    ("load", "mooncake_load"),
)


@dataclass(frozen=True, slots=True)
class Case:
    """What to measure: blocks of `block_bytes`, each in `fragments` pieces of the caller's memory."""

    block_bytes: int
    fragments: int = 1

    @property
    def total(self) -> int:
        return self.block_bytes * NUM_KEYS

    @property
    def num_slices(self) -> int:
        return max(_MIN_SLICES, _RING_BYTES // self.total)

    @property
    def pool_bytes(self) -> int:
        return max(_SEGMENT_BYTES, _POOL_BATCHES * self.total)


class Turn:
    """Slices of the ring for the calls of one turn; their memory was not used recently."""

    def __init__(self, number: int, num_slices: int) -> None:
        self._next = number * 2 * _CALLS
        self._num_slices = num_slices

    def slice(self) -> int:
        self._next += 1
        return self._next % self._num_slices


_Column = Callable[[Turn], dict[str, float]]  # one round's seconds by name


def _timed(call: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def _plain(client: SdkClient) -> _Column:
    def column(turn: Turn) -> dict[str, float]:
        hashes, source, target = client.new_hashes(), turn.slice(), turn.slice()
        took = {
            "save": _timed(lambda: client.save(source, hashes)),
            "load": _timed(lambda: client.load(target, hashes)),
        }
        assert client.is_same(source, target), "wrong bytes"
        return took

    return column


def _direct(client: SdkClient) -> _Column:
    return lambda turn: {"direct_save": _timed(lambda: client.save(turn.slice(), client.new_hashes()))}


def _remote(name: str, here: SdkClient, there: SdkClient) -> _Column:
    def column(turn: Turn) -> dict[str, float]:
        hashes, source, target = there.hashes_at("b", ("a", "b")), turn.slice(), turn.slice()
        there.save(source, hashes)
        return {name: _timed(lambda: here.load(target, hashes))}

    return column


def _baseline(case: Case, client: SdkClient, stream: TcpStream) -> _Column:
    received = np.zeros(case.total, np.uint8)

    def copy(source: int, target: int) -> None:
        for i in range(case.fragments):
            np.copyto(client.slice(target, i), client.slice(source, i))

    def by_block(turn: Turn, is_verified: bool) -> float:
        source, target = client.slice(turn.slice()), client.slice(turn.slice())
        return _timed(lambda: copy_blocks(source, target, case.block_bytes, is_verified))

    def column(turn: Turn) -> dict[str, float]:
        source, target = turn.slice(), turn.slice()
        took = {"memcpy": _timed(lambda: copy(source, target)), "tcp": _timed(lambda: stream.receive(received))}
        if case.fragments == 1:
            took |= {"verified_copy": by_block(turn, True), "plain_copy": by_block(turn, False)}
        return took

    return column


def _redis(case: Case, client: SdkClient, other: redis.RedisClient) -> _Column:
    def column(turn: Turn) -> dict[str, float]:
        keys = [value.to_bytes(8, "little") * 4 for value in client.new_hashes()]
        source, target = client.slice(turn.slice()), client.slice(turn.slice())
        return {
            "redis_save": _timed(lambda: other.save(keys, source, case.block_bytes)),
            "redis_load": _timed(lambda: other.load(keys, target, case.block_bytes)),
        }

    return column


def _mooncake(case: Case, client: SdkClient, other: mooncake.MooncakeClient) -> _Column:
    def column(turn: Turn) -> dict[str, float]:
        names = [str(value) for value in client.new_hashes()]
        source, target = client.slice(turn.slice()), client.slice(turn.slice())
        took = {
            "mooncake_save": _timed(lambda: other.save(names, source, case.block_bytes)),
            "mooncake_load": _timed(lambda: other.load(names, target, case.block_bytes)),
        }
        other.evict(names, case.block_bytes)
        return took

    return column


def _columns(case: Case, stack: contextlib.ExitStack) -> tuple[SdkClient, list[_Column]]:
    def client_of(path: Any, num_slices: int) -> SdkClient:
        client = SdkClient(path, case.block_bytes, NUM_KEYS, num_slices, case.fragments)
        return stack.enter_context(contextlib.closing(client))

    client = client_of(stack.enter_context(private_agent(case.pool_bytes)), case.num_slices)
    stream = stack.enter_context(contextlib.closing(TcpStream(case.total, case.block_bytes)))
    columns = [_baseline(case, client, stream), _plain(client)]
    direct = client_of(stack.enter_context(private_agent(case.pool_bytes, "--direct")), _MIN_SLICES)
    columns.append(_direct(direct))
    if case.fragments > 1:
        return client, columns
    for name, is_encrypted in (("remote_load", False), ("remote_tls_load", True)):
        here, there = stack.enter_context(two_nodes(case.pool_bytes, is_encrypted))
        columns.append(_remote(name, client_of(here, _MIN_SLICES), client_of(there, _MIN_SLICES)))
    server = redis.find_server()
    if server is not None:
        address = stack.enter_context(redis.private_server(server, 2 * case.pool_bytes))
        columns.append(_redis(case, client, stack.enter_context(contextlib.closing(redis.RedisClient(address)))))
    if mooncake.is_installed():
        master = stack.enter_context(mooncake.private_master())
        other = mooncake.MooncakeClient(master, case.pool_bytes, client.ring)
        columns.append(_mooncake(case, client, stack.enter_context(contextlib.closing(other))))
    return client, columns


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """GB/s (10**9 bytes) of batches of NUM_KEYS blocks, medians.

    `*_ratio` is to memcpy of the same bytes, `*_to_*` to what it names. Pools are full and evict, as in use.
    `checksum_share` is what summing the bytes adds to a load. Stores that are not installed have no columns.
    """
    with contextlib.ExitStack() as stack:
        client, columns = _columns(case, stack)
        times: dict[str, list[float]] = {}
        warm_up = -(-(case.pool_bytes // case.total + 1) // _CALLS)
        for number in range(warm_up + rounds):
            for i, column in enumerate(columns):
                turn = Turn(number * len(columns) + i, _slices(case, i))
                for _ in range(_CALLS):
                    for name, took in column(turn).items():
                        times.setdefault(name, []).append(took)
        seconds = {name: median(took[warm_up * _CALLS :]) for name, took in times.items()}
        row: dict[str, Any] = {"block_bytes": case.block_bytes, "fragments": case.fragments}
        row |= {name: round(case.total / took / 1e9, 2) for name, took in seconds.items() if not name.endswith("_copy")}
        for name in ("save", "direct_save", "load", "remote_load", "remote_tls_load"):
            if name in seconds:
                row[f"{name}_ratio"] = round(seconds["memcpy"] / seconds[name], 3)
        for name, other in _COMPARED:
            if name in seconds and other in seconds:
                plain = name.removeprefix("direct_")
                row[f"{name}_to_{other.removesuffix('_' + plain)}"] = round(seconds[other] / seconds[name], 2)
        if case.fragments == 1:
            added = seconds["verified_copy"] - seconds["plain_copy"]
            row["checksum_share"] = round(added / seconds["load"], 3)
        hashes = client.new_hashes()
        client.save(0, hashes)
        row["load_one_us"] = _median_us(lambda: client.load(1, hashes[:1]))
        row["exists_us"] = _median_us(lambda: client.caching.exists(hashes))
        row["ping_us"] = round(ping_pong_us(_SHORT_CALLS), 1)
    return row


def _slices(case: Case, column: int) -> int:
    """Slices the column's client has: the first two share the large ring."""
    return case.num_slices if column < 2 else _MIN_SLICES


def _median_us(call: Callable[[], object]) -> float:
    return round(median(_timed(call) for _ in range(_SHORT_CALLS)) * 1e6, 1)
