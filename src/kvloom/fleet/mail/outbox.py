"""Outbox: a replica's deltas for the requests of one ingress, on their way into that ingress's mailbox."""

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from kvloom.contract.errors import ServingError, Unavailable
from kvloom.contract.request import Delta
from kvloom.engine.feed import Feed
from kvloom.fleet.wire import Letter, encode

ITEM_S = 0.01  # seconds between two items; faster deltas are joined
_LINGER_S = 1.0  # seconds; a mailbox without requests ends, because a stopping replica waits for it
MAX_ITEMS = 10_000  # items of one mailbox: Ray keeps the id of each item while a stream lasts
_LOST = "its mailbox was lost"


@dataclass(slots=True)
class _Carried:
    """One request: `num_deltas` were sent or are in `unsent`. `ended`: that number at the end, or the feed's error."""

    key: int
    feed: Feed
    num_deltas: int
    ended: asyncio.Future[int]
    unsent: list[Delta] = field(default_factory=list)


class Outbox:
    """Owned by the replica's loop; filled from its creation on."""

    def __init__(self) -> None:
        self._carried: dict[int, _Carried] = {}
        self._unsent: list[_Carried] = []  # requests with unsent deltas
        self.is_full = False  # accepts no more requests, and ends with those that it has
        self._is_urgent = False  # an end is sent at once
        self._reader: asyncio.Future[None] | None = None

    async def carry(self, key: int, feed: Feed, num_told: int) -> int:
        """Send the feed's deltas after the first `num_told` until its end. Returns how many there were in all.

        Raises what the feed raises; Unavailable when the mailbox is gone.
        """
        carried = _Carried(key, feed, num_told, asyncio.get_running_loop().create_future())
        self._carried[key] = carried
        feed.follow(lambda: self._heard(carried))
        try:
            return await carried.ended
        finally:
            feed.follow(None)
            del self._carried[key]
            self._wake()  # the linger begins

    async def items(self) -> AsyncGenerator[bytes]:
        """Items of letters, each with those of ITEM_S, until there has been no request for a while.

        An item without letters says that the mailbox is full and another one must be opened.
        """
        sent_s, num_items = -ITEM_S, 0
        try:
            while await self._wait_for_letters():
                while not self._is_urgent and (left_s := sent_s + ITEM_S - time.monotonic()) > 0:
                    await self._wait(left_s)
                sent_s = time.monotonic()
                yield encode(self._letters())
                num_items += 1
                if num_items == MAX_ITEMS:
                    self.is_full = True
                    yield encode([])
        finally:
            for carried in self._carried.values():
                if not carried.ended.done():
                    carried.ended.set_exception(Unavailable(_LOST))

    def _heard(self, carried: _Carried) -> None:
        if carried.ended.done():
            return
        try:
            while step := carried.feed.take():
                self._add(carried, [delta for _, delta in step])
        except ServingError as error:
            carried.ended.set_exception(error)
        self._wake()

    def _add(self, carried: _Carried, deltas: list[Delta]) -> None:
        if not carried.unsent:
            self._unsent.append(carried)
        carried.unsent += deltas
        carried.num_deltas += len(deltas)
        if deltas[-1].finish_reason is not None:
            carried.ended.set_result(carried.num_deltas)
            self._is_urgent = True

    def _letters(self) -> list[Letter]:
        letters = [Letter(each.key, each.num_deltas - len(each.unsent), each.unsent) for each in self._unsent]
        for each in self._unsent:
            each.unsent = []
        self._unsent, self._is_urgent = [], False
        return letters

    async def _wait_for_letters(self) -> bool:
        """False when no request has letters, or will have soon."""
        while not self._unsent:
            if self._carried:
                await self._wait(None)
            elif self.is_full or not await self._wait(_LINGER_S):
                return False
        return True

    async def _wait(self, limit_s: float | None) -> bool:
        """Wait until something changes; False when nothing has."""
        self._reader = asyncio.get_running_loop().create_future()
        done, _ = await asyncio.wait([self._reader], timeout=limit_s)
        return bool(done)

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
