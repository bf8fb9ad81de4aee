"""Outbox: at a replica, what the requests of one ingress bring, on its way into that ingress's mailbox."""

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from kvloom.contract.errors import ServingError, Unavailable
from kvloom.contract.request import Delta
from kvloom.engine.feed import Feed
from kvloom.fleet.wire import Letter, encode

ITEM_S = 0.01  # between two items; what comes faster goes together
_LINGER_S = 1.0  # a mailbox without requests ends, for a replica that is to stop waits for it
MAX_ITEMS = 10_000  # of one mailbox: Ray keeps the id of each item while a stream lasts
_LOST = "its mailbox was lost"


@dataclass(slots=True)
class _Carried:
    """One request: `num_deltas` have been told or are in `unsent`. `ended`: with that number, or the feed's error."""

    key: int
    feed: Feed
    num_deltas: int
    ended: asyncio.Future[int]
    unsent: list[Delta] = field(default_factory=list)


class Outbox:
    """Owned by the replica's loop; filled from the moment that it is made."""

    def __init__(self) -> None:
        self._carried: dict[int, _Carried] = {}
        self._unsent: list[_Carried] = []  # those that have something
        self.is_full = False  # it takes no more requests, and ends when those that it has do
        self._is_urgent = False  # an end is not held back
        self._reader: asyncio.Future[None] | None = None

    async def carry(self, key: int, feed: Feed, num_told: int) -> int:
        """Send what the feed brings behind `num_told` deltas, until its end; how many there were then, all together.

        Raises what the feed does; Unavailable when the mailbox is gone.
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
        """Letters, those of ITEM_S in one item, until nobody has been carried for a while.

        An item without letters says that the mailbox is full: another one is to be opened.
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
        """False when nobody has had one to send, nor will soon."""
        while not self._unsent:
            if self._carried:
                await self._wait(None)
            elif self.is_full or not await self._wait(_LINGER_S):
                return False
        return True

    async def _wait(self, limit_s: float | None) -> bool:
        """Until something changes; False: nothing has."""
        self._reader = asyncio.get_running_loop().create_future()
        done, _ = await asyncio.wait([self._reader], timeout=limit_s)
        return bool(done)

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
