"""Mailroom: an ingress's mailboxes, which replicas fill with deltas, and the delivery of each letter to its request.

A request's own call lasts as long as the request: it ends with it, and fails when the replica is lost. Deltas after the
first come as letters. Both are numbered, because either may overtake the other.
"""

import asyncio
import contextvars
import itertools
import logging
import secrets
from collections.abc import Awaitable, Sequence
from contextlib import aclosing
from typing import cast

from kvloom.contract.request import Delta
from kvloom.engine.feed import Feed
from kvloom.fleet.journey import Journey
from kvloom.fleet.lost import Call, ReplicaLost
from kvloom.fleet.wire import Hint, Letter, Opening, decode_letters, encode

log = logging.getLogger(__name__)

_LOST = "its mailbox was lost"


class Visit:
    """One request on one replica. Owned by the ingress's loop."""

    def __init__(self, journey: Journey, feed: Feed) -> None:
        self.journey = journey
        self.num_told = 0  # deltas of this replica delivered so far
        self.is_over = False  # its last delta was delivered
        self._feed = feed
        self._early: dict[int, Sequence[Delta]] = {}  # deltas that arrived early, by the number of deltas before them
        self._wanted = 0  # number of deltas that a caller waits for
        self._changed: asyncio.Future[None] | None = None
        self._is_lost = False

    def take(self, at: int, deltas: Sequence[Delta]) -> None:
        """Deliver deltas that are next in order, and keep later ones."""
        if at != self.num_told:
            self._early[at] = deltas
            return
        found: Sequence[Delta] | None = deltas
        while found:
            self.num_told += len(found)
            for delta in found:
                self._feed.put(delta.request_id, self.journey.add(delta))
            self.is_over = found[-1].finish_reason is not None
            found = self._early.pop(self.num_told, None)
        if 0 < self._wanted <= self.num_told:
            self._change()

    def lose(self) -> None:
        """Its letters will not arrive."""
        self._is_lost = True
        self._change()

    async def until_told(self, num_deltas: int) -> None:
        """Wait until `num_deltas` are delivered. Raises ReplicaLost when they do not arrive."""
        self._wanted = num_deltas
        while self.num_told < num_deltas:
            self._check()
            self._changed = asyncio.get_running_loop().create_future()
            await self._changed

    async def beside(self, item: Awaitable[bytes | None]) -> bytes | None:
        """Wait for an item of its own call. Raises ReplicaLost when letters fail meanwhile."""
        waiting: asyncio.Future[bytes | None] = asyncio.ensure_future(item)
        try:
            while not waiting.done():
                self._check()
                self._changed = asyncio.get_running_loop().create_future()
                await asyncio.wait((waiting, self._changed), return_when=asyncio.FIRST_COMPLETED)
            return waiting.result()
        finally:
            if not waiting.done():
                waiting.cancel()
                await asyncio.wait([waiting])

    def _check(self) -> None:
        if self._is_lost and not self.is_over:
            raise ReplicaLost(_LOST)

    def _change(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)


class Mailroom:
    """Owned by the ingress's loop. `call` opens a mailbox at a replica."""

    def __init__(self, call: Call) -> None:
        self.name = secrets.token_hex(8)
        self._call = call
        self._keys = itertools.count()
        self._visits: dict[int, Visit] = {}
        self._boxes: dict[str, asyncio.Task[None]] = {}  # by replica
        self._full: set[asyncio.Task[None]] = set()  # mailboxes that only finish their last letters

    def enter(self, visit: Visit) -> int:
        """Register a visit. Returns its key in letters, valid until `leave`."""
        key = next(self._keys)
        self._visits[key] = visit
        return key

    def leave(self, key: int) -> None:
        del self._visits[key]

    def open(self, replica: str) -> None:
        """Open a mailbox at the replica, in the background."""
        if replica not in self._boxes:
            # without the context of the request that opened it, which it outlives
            task = asyncio.get_running_loop().create_task(self._read(replica), context=contextvars.Context())
            self._boxes[replica] = task

    def close(self) -> None:
        for box in (*self._boxes.values(), *self._full):
            box.cancel()

    async def _read(self, replica: str) -> None:
        """Deliver the mailbox's letters until the replica has had none for a while."""
        has_brought = False
        try:
            hint = Hint("", 0, only=replica)
            async with aclosing(self._call(encode(Opening(self.name, replica)), encode(hint))) as items:
                async for item in items:
                    has_brought = True
                    letters = decode_letters(item)
                    if not letters:
                        self._full.add(self._boxes.pop(replica))
                        self.open(replica)
                    self._hand_out(letters)
        except ReplicaLost as problem:
            log.warning("the mailbox at replica %s was lost: %s", replica, problem)
            for visit in self._visits_at(replica):
                visit.lose()
        finally:
            task = asyncio.current_task()
            if self._boxes.get(replica) is task:
                del self._boxes[replica]
            self._full.discard(cast("asyncio.Task[None]", task))
        if has_brought and self._visits_at(replica):  # letters arrived while it ended
            self.open(replica)

    def _hand_out(self, letters: Sequence[Letter]) -> None:
        for letter in letters:
            visit = self._visits.get(letter.key)
            if visit is not None:  # otherwise it has moved, or its caller is gone
                visit.take(letter.at, letter.deltas)

    def _visits_at(self, replica: str) -> list[Visit]:
        return [visit for visit in self._visits.values() if visit.journey.replica == replica]
