"""Reader: the loads of one session."""

import time

from ems.wire import messages as m
from ems.wire.messages import Cause
from kvloom.pool.answering import answers
from kvloom.pool.cluster.coming import Coming
from kvloom.pool.node import Fetched, Node
from kvloom.pool.storage.counts import Denial
from kvloom.pool.storage.passing import Held
from kvloom.pool.storage.pool import Pool

PEER_SHARE = 0.5  # share of the time left for other nodes: a slow one must not use up the client's time for copying
_MAX_LEASES = 1024
_PART_BYTES = 8 << 20  # bytes from other nodes that the client copies while the rest arrives
_MAX_PARTS = 16  # or 1 / it of the rest, if that is more


class Reader:
    """Used by its session's thread only."""

    def __init__(self, pool: Pool, node: Node) -> None:
        self._pool = pool
        self._node = node
        self._leases: dict[int, list[Held]] = {}  # each a prefix in parts
        self._next_lease = 2  # lease numbers: even ones here, odd ones in C++
        self._coming: Coming | None = None
        self._last_bytes = 0  # largest block of the last load from other nodes

    @answers(m.Load)
    def load(self, message: m.Load, deadline_s: float) -> m.Found:
        """The prefix of the keys that is here or arrives from other nodes in time; pinned under a lease.

        Of a long load it returns the first part, with the cause NO_ROOM: the client then asks for the rest.
        """
        keys = m.split_keys(message.keys)
        held = [self._pool.hold_prefix(keys)]
        cause, is_part = Cause.NONE, False
        if len(held[0]) < len(keys):
            cause = self._pool.missed(keys[len(held[0])], len(keys) - len(held[0]))
            if not message.read_local_only and self._node.others is not None:
                cause, is_part = self._extend(keys, held, deadline_s)
        num_found = sum(map(len, held))
        self.count(num_found if is_part else len(keys), num_found, cause)
        lease = self.lend(held)
        parts = [part.located() for part in held] if lease else []
        return m.Found(
            lease=lease,
            segments=[segment for part in parts for segment in part.segments],
            offsets=[offset for part in parts for offset in part.offsets],
            lengths=[length for part in parts for length in part.lengths],
            sums=b"".join(part.sums for part in parts),
            cause=cause,
            num_given_back=self._pool.num_given_back,
        )

    def lend(self, held: list[Held]) -> int:
        """A new lease that takes over the pins; 0 when there is nothing to lend, or too many leases exist."""
        is_something = any(map(len, held))
        if is_something and len(self._leases) >= _MAX_LEASES:
            self._pool.counts.add(Denial.LEASES.counter)
        if not is_something or len(self._leases) >= _MAX_LEASES:
            _release(held)
            return 0
        lease = self._next_lease
        self._next_lease += 2
        self._leases[lease] = held
        return lease

    def _extend(self, keys: list[bytes], held: list[Held], deadline_s: float) -> tuple[Cause, bool]:
        """Add blocks of other nodes to the pinned prefix `held` until one is missing. Returns whether more is
        arriving.
        """
        now_s = time.monotonic()
        deadline_s = now_s + (deadline_s - now_s) * PEER_SHARE
        wanted = keys[sum(map(len, held)) :]
        coming = self._begin(wanted, deadline_s)
        if coming is None:
            more, problem = self._bring(wanted, deadline_s)
        else:
            more, is_over = coming.hold(wanted, max(_PART_BYTES, self._last_bytes * len(wanted) // _MAX_PARTS))
            problem = coming.problem
            if is_over:
                self._coming, self._last_bytes = None, coming.block_bytes or self._last_bytes
            elif len(more) < len(wanted):
                held.append(more)
                return Cause.NO_ROOM, True
        held.append(more)
        if len(more) == len(wanted):
            return Cause.NONE, False
        return problem or self._pool.missed(wanted[len(more)], len(wanted) - len(more)), False

    def _begin(self, keys: list[bytes], deadline_s: float) -> Coming | None:
        """Start loading these keys on a thread of its own, if they are probably many bytes."""
        if self._coming is not None and self._coming.covers(keys):
            return self._coming
        self._forget_coming()
        if self._node.others is None or self._last_bytes * len(keys) < 2 * _PART_BYTES:
            return None
        try:
            self._coming = Coming(self._node.others, self._pool, keys, deadline_s)
        except RuntimeError:  # no thread available
            return None
        return self._coming

    def _forget_coming(self) -> None:
        if self._coming is not None:
            self._coming.stop()
            self._coming = None

    def _bring(self, wanted: list[bytes], deadline_s: float) -> tuple[Held, Cause]:
        """The prefix of these keys, once other nodes have sent what they have."""
        here = self._pool.offer(wanted)  # arriving blocks may evict others
        fetched = self.fetch(wanted, deadline_s, has_end=True)
        self._last_bytes = fetched.block_bytes or self._last_bytes
        more = self._pool.hold_prefix(wanted)
        here.release()
        fetched.release()
        return more, fetched.problem

    def fetch(self, keys: list[bytes], deadline_s: float, has_end: bool = False) -> Fetched:
        """Fetch missing keys from other nodes; they are pinned.

        has_end: blocks behind a key that no node has are useless.
        """
        others = self._node.others
        if others is None:
            return Fetched(Cause.NONE, [])
        if time.monotonic() >= deadline_s:
            return Fetched(Cause.TIMEOUT, [])
        return others.fetch(self._pool, self._pool.missing(keys), deadline_s, has_end)

    def count(self, total: int, hits: int, cause: Cause) -> None:
        """Count for /metrics. cause: of all misses."""
        self._pool.counts.add("load_keys", total)
        self._pool.counts.add("load_hits", hits)
        if hits < total:
            self._pool.counts.add(f"miss_{cause.name.lower()}", total - hits)

    @answers(m.Release)
    def release(self, message: m.Release, _deadline_s: float) -> None:
        """End a lease. A block that the client found damaged is checked here before it is dropped."""
        held = self._leases.pop(message.lease, [])
        number = message.corrupt
        for part in held:
            if 0 <= number < len(part):
                self._pool.distrust(part.blocks()[number])
            number -= len(part)
        _release(held)

    @answers(m.Exists)
    def exists(self, message: m.Exists, deadline_s: float) -> m.Count:
        """Length of the prefix that a load would find."""
        keys = m.split_keys(message.keys)
        count = self._pool.count_prefix(keys)
        others = self._node.others
        while count < len(keys) and others is not None and not message.read_local_only:
            now = time.monotonic()
            found = others.has(self._pool.tenant, keys[count:], now + (deadline_s - now) * PEER_SHARE)
            more = next((i for i, has in enumerate(found) if not has), len(found))
            here = self._pool.count_prefix(keys[count + more :])
            count += more + here
            if here == 0:
                break
        return m.Count(count)

    def close(self) -> None:
        """Ends all leases."""
        self._forget_coming()
        for held in self._leases.values():
            _release(held)
        self._leases = {}


def _release(held: list[Held]) -> None:
    for part in held:
        part.release()
