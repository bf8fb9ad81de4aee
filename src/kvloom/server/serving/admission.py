"""Admission: how many requests run, wait or are refused (maxLinkNum), for all models of a server together."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from kvloom.contract.errors import Overloaded

WAITING_PER_SLOT = 2  # requests that may wait for each one that runs


@dataclass(slots=True, eq=False)
class Ticket:
    """A request's position in the queue. `num_tokens`, of its prompts, count against the limit of tokens."""

    num_tokens: int = 0
    is_stopped: bool = False
    turn: asyncio.Future[bool] | None = field(default=None, repr=False)  # whether a slot was given

    def stop(self) -> None:
        """The request is cancelled: it stops waiting, without a slot."""
        self.is_stopped = True
        if self.turn is not None and not self.turn.done():
            self.turn.set_result(False)


class Admission:
    """Runs at most `limit` requests at once; `waiting_per_slot` times as many wait in order; further ones are refused.

    A request is also refused if its prompt would bring running and waiting prompt tokens above `max_tokens`.
    """

    def __init__(self, limit: int, max_tokens: int | None = None, waiting_per_slot: int = WAITING_PER_SLOT) -> None:
        self.limit, self.max_tokens = limit, max_tokens
        self._max_waiting = waiting_per_slot * limit
        self.num_active = 0  # running and waiting
        self.num_tokens = 0  # prompt tokens of these
        self._num_served = 0
        self._waiting: deque[Ticket] = deque()

    @property
    def is_full(self) -> bool:
        is_over_tokens = self.max_tokens is not None and self.num_tokens >= self.max_tokens
        return self.num_active >= self.limit + self._max_waiting or is_over_tokens

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def slot(self, ticket: Ticket) -> AsyncIterator[None]:
        """A context that waits for an admission slot; a stopped ticket enters without one. Raises Overloaded when too
        many wait.
        """
        self._check(ticket)
        self.num_active += 1
        self.num_tokens += ticket.num_tokens
        has_slot = False
        try:
            has_slot = await self._enter(ticket)
            yield
        finally:
            self.num_active -= 1
            self.num_tokens -= ticket.num_tokens
            if has_slot:
                self._leave()

    def _check(self, ticket: Ticket) -> None:
        """Raises Overloaded. A prompt longer than the limit is admitted when nothing else is there."""
        if self.num_active >= self.limit + self._max_waiting:
            raise Overloaded(f"{self.limit} requests are being served and {self._max_waiting} wait; try again later")
        if self.max_tokens is not None and self.num_active and self.num_tokens + ticket.num_tokens > self.max_tokens:
            raise Overloaded(f"{self.num_tokens} prompt tokens are being served or wait; try again later")

    async def _enter(self, ticket: Ticket) -> bool:
        """Wait for a slot. False when the ticket was stopped."""
        if self._num_served < self.limit:
            self._num_served += 1
            return True
        ticket.turn = asyncio.get_running_loop().create_future()
        self._waiting.append(ticket)
        try:
            return await ticket.turn
        except asyncio.CancelledError:
            if ticket.turn.done() and not ticket.turn.cancelled() and ticket.turn.result():
                self._leave()  # the slot was granted at the same moment
            raise
        finally:
            if ticket in self._waiting:  # stopped or cancelled
                self._waiting.remove(ticket)

    def _leave(self) -> None:
        """Give the slot to the next ticket that still waits."""
        while self._waiting:
            ticket = self._waiting.popleft()
            if ticket.turn is not None and not ticket.turn.done():
                ticket.turn.set_result(True)
                return
        self._num_served -= 1
