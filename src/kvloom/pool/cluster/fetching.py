"""Fetch: blocks requested from one other node, part by part, over all available connections.

The next part is requested while one is still arriving. Parts grow: a hole ends a load, and what lies behind it would be
transferred in vain.
"""

import threading
import time
from collections import Counter
from collections.abc import Iterable

from ems.common.channel import Channel, remaining_ms
from ems.wire import messages as m
from ems.wire.frames import WireError
from ems.wire.messages import Cause, Status
from kvloom.pool.cluster.arrivals import receive_blocks
from kvloom.pool.cluster.peer_line import checked_sums
from kvloom.pool.node import Came
from kvloom.pool.storage.passing import UNSOUND, Announced, Held
from kvloom.pool.storage.pool import Pool

_FIRST_KEYS = 16  # of a load's first part; later parts are larger
_MOST_KEYS = 64
_AHEAD = 2  # requested parts on a connection
_TURN_S = 0.05  # a load's turn at a connection that others may wait for


class Wanted:
    """The keys of a load, in order, and how far it can come. May be called from any thread."""

    def __init__(self, keys: list[bytes], has_end: bool, came: Came | None = None) -> None:
        """has_end: a key that no node has, or that finds no room, ends the load: those behind it are useless. came:
        callback for progress.
        """
        self._number = {key: number for number, key in enumerate(keys)}
        self._has_end = has_end
        self._came = came
        self._end = len(keys)
        self._asked: Counter[bytes] = Counter()  # key -> number of nodes that may still have it
        self._lock = threading.Lock()

    def expect(self, keys: Iterable[bytes]) -> None:
        """One more node is asked for each of these keys."""
        self._asked.update(keys)

    def is_useful(self, key: bytes) -> bool:
        return self._number[key] < self._end

    def lacks(self, key: bytes) -> None:
        """One of the nodes asked does not have it."""
        with self._lock:
            self._asked[key] -= 1
            if not self._asked[key]:
                self._end_at(key)

    def found_no_room(self, key: bytes) -> None:
        with self._lock:
            self._end_at(key)

    def came(self, num_bytes: int) -> None:
        """`num_bytes` of blocks have arrived. The callback may say that this is enough."""
        if self._came is not None and num_bytes and not self._came(num_bytes):
            with self._lock:
                self._end = 0

    def _end_at(self, key: bytes) -> None:
        if self._has_end:
            self._end = min(self._end, self._number[key])


class Fetch:
    """A request to one node. The thread of each connection calls `run`; they share the parts."""

    def __init__(self, pool: Pool, keys: list[bytes], wanted: Wanted) -> None:
        self._pool = pool
        self._wanted = wanted
        self._parts = _parts(keys)
        self._lock = threading.Lock()
        self.held: list[Held] = []  # blocks that arrived, pinned
        self.block_bytes = 0  # bytes of the largest of them

    @property
    def num_parts(self) -> int:
        return len(self._parts)

    def run(self, channel: Channel, deadline_s: float) -> Cause:
        """Transfer some parts; then others may use the connection. An interrupted part is continued by the next caller.

        Returns CORRUPT or NO_ROOM where a block was lost for that reason. Raises as the channel does.
        """
        problem, under_way, until_s = Cause.NONE, list[list[bytes]](), time.monotonic() + _TURN_S
        is_begun = False
        try:
            while True:
                while len(under_way) < _AHEAD and (not is_begun or time.monotonic() < until_s):
                    part = self._take()
                    if not part:
                        break
                    is_begun = True
                    under_way.append(part)
                    request = m.PeerGet(self._pool.tenant, b"".join(part))
                    channel.send(request, deadline_s, deadline_ms=remaining_ms(deadline_s))
                if not under_way:
                    return problem
                problem = self._receive(channel, under_way[0], deadline_s) or problem
                del under_way[0]
        except BaseException:
            with self._lock:
                self._parts[:0] = under_way
            raise

    def _take(self) -> list[bytes]:
        """The keys of the next part that are still useful; none when there are no more."""
        with self._lock:
            while self._parts:
                part = [key for key in self._parts.pop(0) if self._wanted.is_useful(key)]
                if part:
                    return part
        return []

    def _receive(self, channel: Channel, keys: list[bytes], deadline_s: float) -> Cause:
        """Receive the answer to a request for `keys`. Blocks that arrived are removed from the list."""
        answer = channel.receive(deadline_s).message
        if not isinstance(answer, m.PeerBlocks) or len(answer.lengths) != len(keys):
            raise WireError("expected blocks")
        blocks = self._announced(keys, answer)
        problem, keys[:] = Cause.NONE, blocks.keys
        for statuses, held, lengths in receive_blocks(channel, self._pool, blocks, deadline_s):
            for key, status in zip(keys, statuses, strict=False):
                if status == UNSOUND:
                    problem = Cause.CORRUPT
                elif status > Status.CONFLICT:
                    problem = Cause.NO_ROOM
                    self._wanted.found_no_room(key)
            del keys[: len(statuses)]
            with self._lock:
                self.held.append(held)
                self.block_bytes = max(self.block_bytes, *lengths, 0)
            self._wanted.came(sum(lengths))
        return problem

    def _announced(self, keys: list[bytes], answer: m.PeerBlocks) -> Announced:
        """The keys that the other node has."""
        unsealed = checked_sums(answer, b"".join(keys))
        if all(answer.lengths):
            return Announced(keys.copy(), answer.lengths, unsealed, is_rcache=True)
        here = [i for i, length in enumerate(answer.lengths) if length]
        for key, length in zip(keys, answer.lengths, strict=True):
            if not length:
                self._wanted.lacks(key)
        sums = m.split_sums(unsealed)
        found, lengths = [keys[i] for i in here], [answer.lengths[i] for i in here]
        return Announced(found, lengths, b"".join(sums[i] for i in here), is_rcache=True)


def _parts(keys: list[bytes]) -> list[list[bytes]]:
    parts, start, size = [], 0, _FIRST_KEYS
    while start < len(keys):
        parts.append(keys[start : start + size])
        start, size = start + size, min(2 * size, _MOST_KEYS)
    return parts
