"""PictureService: a text-to-image model of the server, its queue, and its counters."""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvloom.contract.errors import BadRequest, GenerationFailed, TimedOut
from kvloom.engine.histogram import Histogram
from kvloom.images.messages import Ended, Paint, Picture, Progress, Report
from kvloom.images.process import Painter
from kvloom.server.observe.meter import TIME_BOUNDS_S
from kvloom.server.serving.admission import Admission, Ticket
from kvloom.server.serving.pictures.card import MAX_STEPS, PictureCard, Wanted

MAX_WAITING = 8  # waiting requests; the next one is refused


@dataclass(slots=True, eq=False)
class Painting:
    """One request under way."""

    id: str
    tenant: str
    num_pictures: int
    ticket: Ticket = field(default_factory=Ticket)
    began_s: float = field(default_factory=time.monotonic)
    is_painting: bool = False
    stopped: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    is_overdue: bool = False  # stopped because it took too long
    picture: int = 0  # the one that is being painted
    step: int = 0
    num_steps: int = 0

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.began_s

    def stop(self, is_overdue: bool = False) -> None:
        """End it now, with an error for its client."""
        if not self.stopped.done():
            self.stopped.set_result(None)
            self.is_overdue = is_overdue
            self.ticket.stop()

    @property
    def is_stopped(self) -> bool:
        return self.stopped.done()


@dataclass(slots=True)
class PictureMeter:
    """Owned by the server's loop."""

    num_received: int = 0
    num_failed: int = 0
    num_aborted: int = 0  # the client disconnected
    num_pictures: int = 0
    num_steps: int = 0
    whole: Histogram = field(default_factory=lambda: Histogram(TIME_BOUNDS_S))  # seconds of requests, waiting included


class PictureService:
    """One request is painted at a time, MAX_WAITING wait."""

    def __init__(self, card: PictureCard, painter: Painter) -> None:
        self.card, self.painter = card, painter
        self.admission = Admission(1, waiting_per_slot=MAX_WAITING)
        self.meter = PictureMeter()
        self._running: dict[int, Painting] = {}
        self._serial = itertools.count()

    @property
    def name(self) -> str:
        return self.card.name

    def order(self, wanted: Wanted) -> Paint:
        """Raises BadRequest for a size or a number of steps that is too large, before anything runs."""
        info, card = self.painter.info, self.card
        width, height = wanted.size or (info.width, info.height)
        for side in (width, height):
            if side % info.multiple:
                raise BadRequest("size", f"must be multiples of {info.multiple}, got {width}x{height}")
        count = len(wanted.seeds)
        if count * width * height > card.max_pixels:
            asked = f"{count} of {width}x{height}"
            raise BadRequest("size", f"{asked} are more than the {card.max_pixels} pixels that a request may have")
        default = card.steps or info.steps
        steps = wanted.steps or min(MAX_STEPS, max(1, round(default * wanted.effort)))
        guidance = card.guidance if wanted.guidance is None else wanted.guidance
        return Paint(
            self.painter.next_id(), wanted.prompt, wanted.negative_prompt, width, height, list(wanted.seeds), steps,
            guidance, wanted.format, wanted.compression, wanted.num_partials,
        )  # fmt: skip

    def running(self) -> list[Painting]:
        """The requests under way, oldest first."""
        return list(self._running.values())

    def stop(self, id: str) -> bool:
        """End requests of this `id`, with an error for their client. Returns whether there were any."""
        found = [item for item in self._running.values() if item.id == id]
        for item in found:
            item.stop()
        return bool(found)

    async def reports(self, order: Paint, id: str, tenant: str = "") -> AsyncGenerator[Report]:
        """The progress of an order. Closing the generator ends the order. Raises ServingError."""
        self.painter.check_ready()
        self.meter.num_received += 1
        is_over = False
        try:
            with self._listed(Painting(id, tenant, len(order.seeds))) as item:
                async with self.admission.slot(item.ticket), aclosing(self.painter.paint(order)) as reports:
                    item.is_painting = True
                    self._check_wanted(item)
                    while not is_over:
                        report = await self._next(reports, item)
                        self._count(report, item)
                        is_over = isinstance(report, Ended)
                        yield report
                self.meter.whole.add(item.age_s)
        except Exception:
            is_over = True
            self.meter.num_failed += 1
            raise
        finally:
            self.meter.num_aborted += not is_over

    @contextmanager
    def _listed(self, item: Painting) -> Iterator[Painting]:
        serial, limit_s = next(self._serial), self.card.time_limit_s
        self._running[serial] = item
        end = None if limit_s is None else asyncio.get_running_loop().call_later(limit_s, item.stop, True)
        try:
            yield item
        finally:
            del self._running[serial]
            if end is not None:
                end.cancel()

    def _count(self, report: Report, item: Painting) -> None:
        if isinstance(report, Progress):
            item.picture, item.step, item.num_steps = report.picture, report.step, report.num_steps
            self.meter.num_steps += 1
        elif isinstance(report, Picture) and report.partial is None:
            self.meter.num_pictures += 1

    async def _next(self, reports: AsyncGenerator[Report], item: Painting) -> Report:
        """The next report. Raises ServingError, also as soon as the item is stopped."""
        coming = asyncio.ensure_future(anext(reports))
        try:
            either: set[asyncio.Future[Any]] = {coming, item.stopped}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            coming.cancel()  # which a report that has come does not mind
            await asyncio.gather(coming, return_exceptions=True)
        self._check_wanted(item)
        return coming.result()

    def _check_wanted(self, item: Painting) -> None:
        """Raises TimedOut, GenerationFailed."""
        if item.is_overdue:
            raise TimedOut(f"the request was ended after {self.card.time_limit_s:g} s, as e2eTimeout says")
        if item.is_stopped:
            raise GenerationFailed("the request was ended by an operator")
