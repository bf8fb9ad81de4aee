"""Finds how long a prefix the pool has for a request, over all ranks and kinds of attention."""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain

from ems.circuit import Circuit
from ems.config import CcKvOption
from ems.integration.prefix import Kind, longest_hit
from ems.integration.settings import RankLayout, Settings
from ems.session import Session

_HEALTH_S = 1.0
_THREADS = 4


class Lookup:
    """Asks the pool for the longest prefix that all ranks have completely."""

    def __init__(self, settings: Settings, layouts: Sequence[RankLayout], kinds: Sequence[Kind]) -> None:
        self._timeout_s = settings.timeout_ms / 1000
        self._kinds = kinds
        self._sessions: list[list[Session]] = [  # for each kind, one session a rank
            [rank.open(settings, i, rank.kinds[i].empty_cache()) for rank in layouts] for i in range(len(kinds))
        ]
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="ems-lookup")
        self._circuit = Circuit(lambda: self._sessions[0][0].is_healthy(_HEALTH_S))
        self._circuit.wait_for_first_look()  # so that the first request finds a connection

    @property
    def num_ranks(self) -> int:
        """Number of ranks that hold a part of each block."""
        return len(self._sessions[0])

    @property
    def is_up(self) -> bool:
        return self._circuit.is_up

    def begin(self, hashes: list[list[int]], start: int, end: int) -> "Future[int] | None":
        """How many tokens, at most `end`, an engine that has `start` can have with the pool; None while the pool is
        down.

        hashes: for each kind, those of all blocks up to `end`.
        """
        if not self._circuit.is_up:
            return None
        return self._executor.submit(self._reach, hashes, start, end, time.monotonic() + self._timeout_s)

    def count(self, hashes: list[list[int]]) -> "Future[list[int]] | None":
        """For each kind, how many of these blocks the pool has, from the first on: all of them when it does not answer.
        None while the pool is down.
        """
        if not self._circuit.is_up:
            return None
        return self._executor.submit(self._count_all, hashes, time.monotonic() + self._timeout_s)

    def _reach(self, hashes: list[list[int]], start: int, end: int, deadline_s: float) -> int:
        def count(kind: int, first: int, last: int) -> int:
            return self._count(kind, hashes[kind][first:last], deadline_s)

        reached = longest_hit(self._kinds, start, end, count)
        self._end(deadline_s)
        return reached

    def _count_all(self, hashes: list[list[int]], deadline_s: float) -> list[int]:
        counts = [self._count(kind, some, deadline_s) for kind, some in enumerate(hashes)]
        is_in_time = self._end(deadline_s)
        wanted = list(map(len, hashes))
        if is_in_time and counts != wanted and not self._sessions[0][0].is_healthy(_HEALTH_S):
            self._circuit.failed("it does not answer")
            is_in_time = False
        return counts if is_in_time else wanted

    def _count(self, kind: int, hashes: list[int], deadline_s: float) -> int:
        """How many of these blocks, from the first on, all ranks have."""
        found = len(hashes)
        for session in self._sessions[kind]:
            left_ms = int((deadline_s - time.monotonic()) * 1000)
            some = hashes[:found] if left_ms > 0 else []
            found = session.caching.exists(some, CcKvOption(timeout=left_ms)) if some else 0
        return found

    def _end(self, deadline_s: float) -> bool:
        """A lookup is over. Returns whether it was in time."""
        is_in_time = time.monotonic() < deadline_s
        if is_in_time:
            self._circuit.succeeded()
        else:
            self._circuit.failed("a lookup took longer than its deadline")
        return is_in_time

    def close(self) -> None:
        self._circuit.close()
        self._executor.shutdown(wait=True, cancel_futures=True)
        for session in chain.from_iterable(self._sessions):
            session.close()
