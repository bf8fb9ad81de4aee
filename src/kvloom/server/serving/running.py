"""Running generations of one model: found by the caller's id, listed by age, and stopped."""

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvloom.contract.request import Delta, FinishReason, Request
from kvloom.server.observe.timing import Timing
from kvloom.server.serving.admission import Ticket
from kvloom.server.serving.engine import EngineLike
from kvloom.server.serving.generation import Generation


@dataclass(slots=True, eq=False)
class Running:
    """A generation under way: its admission ticket, its engine requests once admitted, and its progress."""

    ticket: Ticket
    requests: list[Request]
    generation: Generation
    timing: Timing
    is_overdue: bool = False  # stopped because it took too long

    @property
    def adapters(self) -> set[int]:
        """Those of the engine that it uses; 0 = none."""
        return {request.adapter for request in self.requests}


class Runs:
    """Accepted and unfinished generations of one engine. Owned by the server's loop."""

    def __init__(self, engine: EngineLike) -> None:
        self._engine = engine
        self._by_id: dict[str, set[Running]] = {}
        self._serial = itertools.count()
        self._leaving: set[int] = set()  # adapters to be unloaded once nothing uses them

    def __len__(self) -> int:
        return len(self._by_id)

    def next_serial(self) -> int:
        """A number that no other generation of this engine gets."""
        return next(self._serial)

    @contextmanager
    def added(self, running: Running, limit_s: float | None = None) -> Iterator[Running]:
        """A context that registers the generation; after `limit_s` it is stopped as overdue."""
        loop = asyncio.get_running_loop()
        end = None if limit_s is None else loop.call_later(limit_s, self._stop_overdue, running)
        try:
            with self._known(running):
                yield running
        finally:
            if end is not None:
                end.cancel()

    @contextmanager
    def _known(self, running: Running) -> Iterator[Running]:
        id = running.generation.id
        same_id = self._by_id.setdefault(id, set())
        same_id.add(running)
        try:
            yield running
        finally:
            same_id.discard(running)
            if not same_id:
                self._by_id.pop(id, None)
            self._unload_unused()

    def oldest_first(self) -> list[Running]:
        items = [item for same_id in self._by_id.values() for item in same_id]
        return sorted(items, key=lambda item: -item.timing.age_s)

    def stop(self, id: str) -> bool:
        """End generations of this `id` with the tokens they have. Returns whether there were any."""
        running = self._by_id.get(id, ())
        for item in running:
            self._stop(item)
        return bool(running)

    def unload(self, adapter: int) -> None:
        """Unload an adapter, which no new generation may name, once those have ended that run with it or wait."""
        self._leaving.add(adapter)
        self._unload_unused()

    def _unload_unused(self) -> None:
        if self._leaving:
            used = {adapter for same_id in self._by_id.values() for item in same_id for adapter in item.adapters}
            for adapter in self._leaving - used:
                self._engine.unload_adapter(adapter)
            self._leaving &= used

    def _stop_overdue(self, running: Running) -> None:
        running.is_overdue = True
        self._stop(running)

    def _stop(self, running: Running) -> None:
        running.ticket.stop()
        for request in running.requests:
            self._engine.abort(request.id)

    def stop_all(self) -> None:
        for id in list(self._by_id):
            self.stop(id)


def aborted(request: Request) -> Delta:
    """The only delta of a request that was stopped before it started."""
    return Delta(request.id, finish_reason=FinishReason.ABORT)
