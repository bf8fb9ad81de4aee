"""FrameBudget: memory that all clients share for incomplete frames and unread replies. No I/O."""

from collections.abc import Callable
from dataclasses import dataclass, field

_MAX_BYTES = 64 << 20


class FrameBudget:
    """Bytes held by holders (any hashable), bounded in total."""

    def __init__(self, max_bytes: int) -> None:
        self._free = max_bytes
        self._held: dict[object, int] = {}
        self._waiting: dict[object, tuple[int, Callable[[], None]]] = {}  # waiting holders, oldest first

    def take(self, holder: object, num_bytes: int, on_room: Callable[[], None]) -> bool:
        """Whether `holder` gets the bytes now, in addition to its others; if not, `on_room` is called when it does, in
        turn.

        A holder waits for one piece at a time. A request larger than the total waits for ever.
        """
        if self._waiting or num_bytes > self._free:
            self._waiting[holder] = (num_bytes, on_room)
            return False
        self._give(holder, num_bytes)
        return True

    def set(self, holder: object, num_bytes: int) -> object | None:
        """`holder` holds `num_bytes` now. Returns the largest holder when the total is exceeded."""
        self._give(holder, num_bytes - self._held.get(holder, 0))
        if self._free < 0:
            return max(self._held, key=lambda one: self._held[one])
        return None

    def leave(self, holder: object) -> None:
        """Free what it holds, and stop waiting."""
        self._waiting.pop(holder, None)
        self._free += self._held.pop(holder, 0)
        while self._waiting:
            first, (num_bytes, on_room) = next(iter(self._waiting.items()))
            if num_bytes > self._free:
                return
            del self._waiting[first]
            self._give(first, num_bytes)
            on_room()

    def _give(self, holder: object, num_bytes: int) -> None:
        self._free -= num_bytes
        self._held[holder] = self._held.get(holder, 0) + num_bytes
        if not self._held[holder]:
            del self._held[holder]


@dataclass(frozen=True, slots=True)
class FrameBudgets:
    """The budgets that all clients share."""

    unread: FrameBudget = field(default_factory=lambda: FrameBudget(_MAX_BYTES))  # for incomplete frames
    unsent: FrameBudget = field(default_factory=lambda: FrameBudget(_MAX_BYTES))  # for replies that are not read
