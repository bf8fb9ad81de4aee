"""Room: memory that all clients share for frames that are not whole yet, and for replies that are not read. No I/O."""

from collections.abc import Callable
from dataclasses import dataclass, field

_MAX_BYTES = 64 << 20


class Room:
    """Bytes held for others, each by somebody (any hashable), up to a number in all."""

    def __init__(self, max_bytes: int) -> None:
        self._free = max_bytes
        self._held: dict[object, int] = {}
        self._waiting: dict[object, tuple[int, Callable[[], None]]] = {}  # oldest first

    def take(self, holder: object, num_bytes: int, on_room: Callable[[], None]) -> bool:
        """Whether `holder` has them now, besides what it had; else `on_room` is called once it has, in turn.

        A holder waits for one piece at a time. Who asks for more than there is in all waits for ever.
        """
        if self._waiting or num_bytes > self._free:
            self._waiting[holder] = (num_bytes, on_room)
            return False
        self._give(holder, num_bytes)
        return True

    def set(self, holder: object, num_bytes: int) -> object | None:
        """`holder` holds so many now. Returns the one that holds most when all together hold too much."""
        self._give(holder, num_bytes - self._held.get(holder, 0))
        if self._free < 0:
            return max(self._held, key=lambda one: self._held[one])
        return None

    def leave(self, holder: object) -> None:
        """It holds nothing and waits for nothing any more."""
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
class Rooms:
    """Of all clients."""

    unread: Room = field(default_factory=lambda: Room(_MAX_BYTES))  # frames that are not whole
    unsent: Room = field(default_factory=lambda: Room(_MAX_BYTES))  # replies that clients do not read
