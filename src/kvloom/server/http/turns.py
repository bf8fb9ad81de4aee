"""Whose body is read next: several at once, short ones before long ones that came a little earlier.

A body's place is when it came plus a second for each `_FAIR_BYTES`. So a short body overtakes a long one, and a long
one that has waited is overtaken no more. One of the turns is never a long body's: a short one never waits for a long
one's end.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

LONG_BYTES = 64 << 10  # a body above it may take a second; others some tens of milliseconds
_FAIR_BYTES = 256 << 10  # read in about a second


@dataclass(slots=True)
class _Place:
    """A body that waits. `due_s`: its order."""

    due_s: float
    is_long: bool
    given: asyncio.Future[None]


class Turns:
    """`num` at once. Used on one loop. `clock`: seconds."""

    def __init__(self, num: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._free, self._free_long = num, max(1, num - 1)
        self._clock = clock
        self._waiting: list[_Place] = []

    @asynccontextmanager
    async def turn(self, num_bytes: int) -> AsyncIterator[None]:
        """A context that begins with the turn of a body of `num_bytes` and ends it. May be cancelled at any time."""
        is_long = num_bytes > LONG_BYTES
        given: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = _Place(self._clock() + num_bytes / _FAIR_BYTES, is_long, given)
        self._waiting.append(place)
        self._give()
        try:
            await given
        except asyncio.CancelledError:
            if not given.cancelled():  # it was given in the same moment
                self._end(is_long)
            elif place in self._waiting:
                self._waiting.remove(place)
            raise
        try:
            yield
        finally:
            self._end(is_long)

    def _end(self, is_long: bool) -> None:
        self._free += 1
        self._free_long += is_long
        self._give()

    def _give(self) -> None:
        """Give free turns to those who may have them, in their order."""
        for place in sorted(self._waiting, key=lambda each: each.due_s):
            if place.given.cancelled():  # its task has still to hear of it
                self._waiting.remove(place)
            elif self._free and (not place.is_long or self._free_long):
                self._free -= 1
                self._free_long -= place.is_long
                self._waiting.remove(place)
                place.given.set_result(None)
