"""SegmentMaps: the pool's memory as mapped into this process."""

import threading

from ems.common.memory import map_shared
from ems.native.functions import Segment
from ems.native.line import Mapped
from ems.runs import Bytes, address_of

_IDLE_S = 30.0  # mappings that were unused for one to two such periods are dropped


class SegmentMaps:
    """Mappings of the agent's segments, shared by the links of a process; dropped when another agent answers.

    A thread drops unused ones after a while: memory that the agent has given back is only freed when it is unmapped,
    and a process that loads no more would not notice otherwise.
    """

    def __init__(self, idle_s: float = _IDLE_S) -> None:
        self._lock = threading.Lock()
        self._idle_s = idle_s
        self._is_used = self._is_watched = False
        self._closed = threading.Event()
        self._incarnation = b""
        self._num_given_back = 0
        self._said: set[tuple[bytes, str]] = set()
        self._maps: dict[int, Bytes] = {}
        self._mapped: Mapped | None = None  # the same for C++, until it changes

    def keep_up(self, incarnation: bytes, num_given_back: int) -> None:
        """Drop all mappings if the pool has given segments back: their memory is freed when no process maps it."""
        with self._lock:
            if (incarnation, num_given_back) != (self._incarnation, self._num_given_back):
                self._incarnation, self._num_given_back, self._maps = incarnation, num_given_back, {}
                self._mapped = None

    def is_news(self, incarnation: bytes, problem: str) -> bool:
        """Whether this problem was not logged for that agent yet."""
        with self._lock:
            is_new = (incarnation, problem) not in self._said
            self._said.add((incarnation, problem))
            return is_new

    def find(self, incarnation: bytes, segment: int) -> Bytes | None:
        with self._lock:
            if incarnation != self._incarnation:
                self._incarnation, self._maps, self._mapped = incarnation, {}, None
            self._is_used = True
            return self._maps.get(segment)

    def mapped(self, incarnation: bytes) -> Mapped:
        """All of them, for C++."""
        with self._lock:
            if incarnation != self._incarnation:
                self._incarnation, self._maps, self._mapped = incarnation, {}, None
            self._is_used = True
            if self._mapped is None:
                rows = [Segment(n, address_of(memory), len(memory)) for n, memory in self._maps.items()]
                self._mapped = Mapped((Segment * len(rows))(*rows), list(self._maps.values()), self._num_given_back)
            return self._mapped

    def add(self, incarnation: bytes, segment: int, fd: int, size: int, is_writable: bool) -> Bytes:
        """Maps the descriptor; a second mapping of the same segment is dropped in favour of the first."""
        mapped = map_shared(fd, size, is_writable)
        with self._lock:
            if incarnation != self._incarnation:
                self._incarnation, self._maps = incarnation, {}
            self._mapped = None
            if not self._is_watched:
                self._is_watched = True
                threading.Thread(target=self._watch, name="ems-maps", daemon=True).start()
            return self._maps.setdefault(segment, mapped)

    def _watch(self) -> None:
        """Runs until nothing is mapped."""
        while self._is_watched:
            is_closed = self._closed.wait(self._idle_s)
            with self._lock:
                if is_closed or not self._is_used:
                    self._maps, self._mapped, self._is_watched = {}, None, False
                self._is_used = False

    def close(self) -> None:
        """Drop all mappings."""
        self._closed.set()
