"""EngineTier: the rest of the cluster as one distributed store, instead of peers.

Calls run on a few threads. A call that outlives its deadline is abandoned, not interrupted: its late result is dropped,
and the blocks that it reads stay pinned until it returns, so that their memory is not reused. A store that is full, or
may only be read, is asked for what it has, and given nothing for a while.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from itertools import compress
from typing import Any, Generic, NamedTuple, TypeVar

import xxhash

from ems.common.breaker import Breaker
from ems.wire.messages import SUM_BYTES, Cause
from kvloom.pool.cluster.secured import Complaints
from kvloom.pool.node import Came, Fetched, Outgoing, Route
from kvloom.pool.storage.entries import Block, NoRoom, Reservation, Written
from kvloom.pool.storage.entrywise import HeldEntries
from kvloom.pool.storage.pool import Pool
from kvloom.pool.storage.seals import sealed
from kvloom.pool.stores.engine import Engine, EngineError, EngineFull

_WORKERS = 4  # threads; abandoned calls hold one each
_PUSH_BLOCKS, _PUSH_BYTES = 16, 64 << 20  # most blocks stored by one call, and most bytes without the last block
# Most blocks requested at once, and most bytes if they are as large as the largest so far. A missing block ends a load,
# so what lies behind it would be loaded in vain.
_FETCH_KEYS, _FETCH_BYTES = 16, 64 << 20
_MAX_QUEUE = 1024  # most blocks waiting to be stored; further ones wait
_PUSH_S = 10.0
_FORM = 2  # of the stored values: a seal, then the bytes
_SILENT, _FULL = "the store does not answer", "the store takes no blocks, which stay on this node"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Push:
    pool: Pool
    entry: Block


class _Answer(NamedTuple, Generic[T]):
    """A result of the store. problem: NONE; TIMEOUT or PEER_DOWN = there is no result."""

    problem: Cause
    result: T | None


class EngineTier:
    """Implements `kvloom.pool.node.Others`. Any thread may call; nothing here raises for what the store does."""

    def __init__(self, engine: Engine, now: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._now = now
        self._breaker = Breaker()
        self._room = Breaker()  # open while the store takes no values, whatever it answers besides
        self._complaints = Complaints()
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._num_busy = 0
        self._largest = 1  # bytes of the largest value that came
        self._pushes: queue.Queue[_Push | None] = queue.Queue(_MAX_QUEUE)
        self._is_closed = False
        for _ in range(_WORKERS):
            threading.Thread(target=self._work, name="ems-engine", daemon=True).start()
        threading.Thread(target=self._push_all, name="ems-engine-push", daemon=True).start()

    # Others

    def route(self, key: bytes) -> Route:
        """The home of all blocks is the store, unless it is unreachable or full for now."""
        with self._lock:
            now_s = self._now()
            is_cut_off = self._breaker.is_open(now_s) or self._room.is_open(now_s)
            return Route.CUT_OFF if is_cut_off else Route.AWAY

    def fetch(
        self, pool: Pool, keys: list[bytes], deadline_s: float, has_end: bool = False, came: Came | None = None
    ) -> Fetched:
        """Brings those blocks that the store has into the pool, as copies; they are pinned."""
        problem, entries, start = Cause.NONE, list[Block](), 0
        while start < len(keys):
            part = keys[start : start + max(1, min(_FETCH_KEYS, _FETCH_BYTES // self._largest))]
            start += len(part)
            one, found = self._fetch(pool, part, deadline_s)
            problem, entries = one or problem, entries + found
            is_wanted = came is None or came(sum(entry.length for entry in found))
            if not is_wanted or (has_end and (one or len(found) < len(part))):
                break
        return Fetched(problem, [HeldEntries(pool, entries)], max((entry.length for entry in entries), default=0))

    def _fetch(self, pool: Pool, keys: list[bytes], deadline_s: float) -> tuple[Cause, list[Block]]:
        names = _names(pool.tenant, keys)
        problem, values = self._call(lambda: self._engine.get(names), deadline_s)
        entries: list[Block] = []
        for key, value in zip(keys, values or [], strict=False):
            if value is not None:
                self._largest = max(self._largest, len(value))
                one, entry = _keep(pool, key, value)
                problem = one or problem
                if entry is not None:
                    entry.is_home = True
                    entries.append(entry)
        return problem, entries

    def has(self, tenant: str, keys: list[bytes], deadline_s: float) -> list[bool]:
        """Which of `keys` the store has; none when it does not say so in time."""
        names = _names(tenant, keys)
        _problem, found = self._call(lambda: self._engine.has(names), deadline_s)
        return found or [False] * len(keys)

    def push_later(self, pool: Pool, entry: Block, parent: bytes, deadline_s: float) -> bool:
        """Stores a block in the background; False when too many wait for that until the deadline.

        Takes over one pin; the store keeps no chains.
        """
        try:
            self._pushes.put(_Push(pool, entry), timeout=max(0.0, deadline_s - self._now()))
        except queue.Full:
            pool.counts.add("push_dropped")
            pool.unpin([entry])
            return False
        return True

    def push_now(self, tenant: str, block: Outgoing, deadline_s: float) -> bool:
        """Stores a block; False when that did not end in time."""
        names = _names(tenant, [block.key])
        values = [b"".join((sealed(block.key, block.checksum), block.data.data))]
        future = self._submit(lambda: self._engine.put(names, values), is_put=True)
        return future is not None and self._has_stored(future, deadline_s)

    def status(self) -> dict[str, bool]:
        """Whether the store is reachable at present."""
        return {"engine": self.route(b"") is Route.AWAY}

    def close(self) -> None:
        """End the threads as their calls return; calls under way fail."""
        self._is_closed = True
        for _ in range(_WORKERS):
            self._calls.put(None)
        with contextlib.suppress(queue.Full):
            self._pushes.put_nowait(None)
        self._engine.close()

    # Threads

    def _call(self, call: Callable[[], T], deadline_s: float) -> "_Answer[T]":
        """Run a call until the deadline."""
        future = self._submit(call)
        if future is None:
            return _Answer(Cause.PEER_DOWN, None)
        return self._wait(future, deadline_s)

    def _submit(self, call: Callable[[], T], is_put: bool = False) -> "Future[T] | None":
        """Run the call on a thread; None when the store is unreachable for now, or abandoned calls hold all threads, or
        it takes no values and this is one.
        """
        with self._lock:
            now_s = self._now()
            if self._num_busy >= _WORKERS or (is_put and self._room.is_open(now_s)):
                return None
            if not self._breaker.allows(now_s):
                return None
            self._num_busy += 1
        future: Future[T] = Future()
        self._calls.put((future, call))
        return future

    def _has_stored(self, future: "Future[None]", deadline_s: float) -> bool:
        """Whether a put ended well in time."""
        is_done = self._wait(future, deadline_s).problem is Cause.NONE
        if is_done:
            self._complaints.forget(_FULL)
            with self._lock:
                self._room.succeed()
        return is_done

    def _wait(self, future: "Future[T]", deadline_s: float) -> "_Answer[T]":
        start_s = self._now()
        try:
            result = future.result(max(0.0, deadline_s - start_s))
        except FutureTimeoutError:
            with self._lock:
                now_s = self._now()
                self._breaker.give_up(now_s - start_s, now_s)
            self._complain(self._breaker, _SILENT, "it is late")
            return _Answer(Cause.TIMEOUT, None)
        except EngineFull as error:
            with self._lock:
                self._breaker.succeed()
                self._room.fail(self._now())
            self._complain(self._room, _FULL, str(error))
            return _Answer(Cause.PEER_DOWN, None)
        except EngineError as error:
            with self._lock:
                self._breaker.fail(self._now())
            self._complain(self._breaker, _SILENT, str(error))
            return _Answer(Cause.PEER_DOWN, None)
        self._complaints.forget(_SILENT)
        with self._lock:
            self._breaker.succeed()
        return _Answer(Cause.NONE, result)

    def _complain(self, breaker: Breaker, what: str, why: str) -> None:
        """Log a problem that lasts, once."""
        if breaker.is_open(self._now()):
            self._complaints.warn(what, why)

    def _work(self) -> None:
        while (task := self._calls.get()) is not None:
            future, call = task
            start_s = self._now()
            try:
                result, error = call(), None
            except EngineError as raised:
                result, error = None, raised
            except Exception as raised:  # a bug in the client library must not end the thread
                result, error = None, EngineError(repr(raised))
            with self._lock:
                self._num_busy -= 1
                if error is None and self._now() - start_s < self._breaker.patience_s:
                    self._breaker.succeed()  # also where the caller had no time to wait for it
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

    def _push_all(self) -> None:
        while (push := self._pushes.get()) is not None and not self._is_closed:
            batch, size = [push], push.entry.length
            while len(batch) < _PUSH_BLOCKS and size < _PUSH_BYTES:
                try:
                    more = self._pushes.get_nowait()
                except queue.Empty:
                    break
                if more is None:
                    return
                batch.append(more)
                size += more.entry.length
            self._push(batch)

    def _push(self, batch: list[_Push]) -> None:
        """Store a batch; its pins end when the call returns, however late. The store is first asked which known blocks
        it still has.
        """

        def put() -> None:
            try:
                missing = self._missing(batch)
                if missing:
                    self._engine.put(list(map(_name, missing)), [_value(push) for push in missing])
            finally:
                for push in batch:
                    push.pool.unpin([push.entry])

        future = self._submit(put, is_put=True)
        is_done = future is not None and self._has_stored(future, self._now() + _PUSH_S)
        for push in batch:
            push.entry.is_home = is_done
            push.pool.counts.add("push_done" if is_done else "push_failed")
            if future is None:
                push.pool.unpin([push.entry])

    def _missing(self, batch: list[_Push]) -> list[_Push]:
        """Blocks that must be stored: new ones, and those that the store has lost."""
        known = [push for push in batch if push.entry.is_home]
        has = self._engine.has(list(map(_name, known))) if known else []
        there = {push.entry.key for push in compress(known, has)}
        return [push for push in batch if push.entry.key not in there]


def _name(push: _Push) -> str:
    return _names(push.pool.tenant, [push.entry.key])[0]


def _value(push: _Push) -> bytes:
    """The stored form of a block: its seal, then its bytes."""
    entry = push.entry
    return b"".join((sealed(entry.key, entry.checksum), push.pool.view(entry.offset, entry.length).data))


def _names(tenant: str, keys: list[bytes]) -> list[str]:
    """Names in the store: the tenant first, so that access rules can separate tenants; then the form of the value.
    Values without a seal, of earlier versions, have names without a form, and are neither read nor replaced.
    """
    return [f"ems:{tenant}:{_FORM}:{key.hex()}" for key in keys]


def _keep(pool: Pool, key: bytes, value: memoryview) -> tuple[Cause, Block | None]:
    """Publish a value of the store if its seal matches. Returns the problem, and the block, pinned."""
    data = value[SUM_BYTES:]
    if len(data) == 0:
        pool.counts.add("corrupt_on_wire")
        return Cause.CORRUPT, None
    begun = pool.begin(key, len(data), is_rcache=True)
    if isinstance(begun, NoRoom):
        return Cause.NO_ROOM, None
    if not isinstance(begun, Reservation):
        return Cause.NONE, begun
    view = pool.view(begun.offset, begun.length).data
    view[:] = data
    checksum = xxhash.xxh3_128_digest(view)
    if sealed(key, checksum) != value[:SUM_BYTES]:
        pool.abandon(begun)
        pool.counts.add("corrupt_on_wire")
        return Cause.CORRUPT, None
    return Cause.NONE, pool.publish(Written(begun, checksum)).entry
