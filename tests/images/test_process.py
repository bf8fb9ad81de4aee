"""The painter process and the server's end of it, over a pipeline whose steps the test releases."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec

import pytest

from kvloom.contract.errors import BadRequest, GenerationFailed, Overloaded, TimedOut, Unavailable
from kvloom.contract.lifecycle import Failed, Pong, Ready
from kvloom.images.messages import Cancel, Ended, Paint, Picture, PipelineInfo, Progress, Report, Sent, Setup
from kvloom.processes.channel import Channel
from kvloom.server.serving.pictures.card import PictureCard, Wanted
from kvloom.server.serving.pictures.service import MAX_WAITING, PictureService
from tests.support.waiting import WAIT_S

pytestmark = pytest.mark.skipif(find_spec("diffusers") is None, reason="needs diffusers: pip install 'kvloom[images]'")
INFO = PipelineInfo("StableDiffusionPipeline", 64, 64, 8, 4, 77)


@dataclass
class SlowPipeline:
    """A pipeline in which each step waits until the test allows it."""

    info: PipelineInfo = INFO
    allowed: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    steps: list[tuple[int, int]] = field(default_factory=list)
    problem: Exception | None = None

    def check(self, paint: Paint) -> int:
        if self.problem is not None:
            raise self.problem
        return 5

    def paint(self, paint: Paint, number: int, on_step: Callable[..., None], on_picture: Callable[..., None]) -> None:
        for step in range(paint.steps):
            assert self.allowed.acquire(timeout=WAIT_S)
            self.steps.append((paint.id, step + 1))
            on_step(number, step + 1, paint.steps)
        on_picture(number, b"picture", None)


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> SlowPipeline:
    made = SlowPipeline()
    monkeypatch.setattr("kvloom.images.pipeline.open_pipeline", lambda setup: made)
    return made


@pytest.fixture
def channel(pipeline: SlowPipeline) -> Iterator[Channel]:
    """A channel to a painter that runs in a thread of this process."""
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=served, args=(theirs,))
    thread.start()
    channel = Channel(ours, Ready[PipelineInfo] | Failed)
    channel.send(Setup("/nowhere"))
    assert channel.receive(WAIT_S) == Ready(INFO)
    channel.expect(Report)
    yield channel
    channel.close()
    for _ in range(100):
        pipeline.allowed.release()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def served(sock: socket.socket) -> None:
    with sock:
        try:
            import_module("kvloom.images.main").serve(Channel(sock, Setup))
        except (EOFError, OSError):
            return


def order(id: int, **fields: object) -> Paint:
    values = {"prompt": "x", "negative_prompt": "", "width": 64, "height": 64, "seeds": [1], "steps": 4, **fields}
    return Paint(id, **values)


def test_the_reports_of_an_order(channel: Channel, pipeline: SlowPipeline):
    channel.send(order(7, steps=2, seeds=[1, 2]))
    for _ in range(4):
        pipeline.allowed.release()
    reports = [channel.receive(WAIT_S) for _ in range(7)]
    assert reports == [
        Progress(7, 0, 1, 2), Progress(7, 0, 2, 2), Picture(7, 0, b"picture", None, 5),
        Progress(7, 1, 1, 2), Progress(7, 1, 2, 2), Picture(7, 1, b"picture", None, 5), Ended(7, 5),
    ]  # fmt: skip


def test_a_cancel_ends_the_order_within_the_step_that_runs(channel: Channel, pipeline: SlowPipeline):
    channel.send(order(1, steps=100))
    pipeline.allowed.release()
    assert channel.receive(WAIT_S) == Progress(1, 0, 1, 100)
    channel.send(Cancel(1))
    channel.send(order(2, steps=1))
    for _ in range(2):  # one for the running step, one for the other order
        pipeline.allowed.release()
    reports = [channel.receive(WAIT_S)]
    while reports[-1] != Ended(2, 5):
        reports.append(channel.receive(WAIT_S))
    assert Ended(1, error="cancelled") in reports
    assert len([step for id, step in pipeline.steps if id == 1]) <= 2
    assert [step for id, step in pipeline.steps if id == 2] == [1]


def test_an_order_that_is_cancelled_while_it_waits_is_never_painted(channel: Channel, pipeline: SlowPipeline):
    channel.send(order(1, steps=1))
    for message in (order(2, steps=1), Cancel(2), order(3, steps=1)):
        channel.send(message)
    for _ in range(2):
        pipeline.allowed.release()
    while channel.receive(WAIT_S) != Ended(3, 5):
        pass
    assert [id for id, _ in pipeline.steps] == [1, 3]


def test_a_refusal_and_a_failure_leave_the_process_up(channel: Channel, pipeline: SlowPipeline):
    pipeline.problem = BadRequest("prompt", "is too long")
    channel.send(order(1))
    assert channel.receive(WAIT_S) == Ended(1, error="is too long", field="prompt")
    pipeline.problem = ValueError("no")
    channel.send(order(2))
    assert channel.receive(WAIT_S) == Ended(2, error="the pipeline failed: ValueError: no")
    pipeline.problem = None
    channel.send(order(3, steps=1))
    pipeline.allowed.release()
    assert [channel.receive(WAIT_S) for _ in range(3)][-1] == Ended(3, 5)


# -- the service


@dataclass
class FakePainter:
    """A painter that paints at once, or waits while `gate` is closed."""

    info: PipelineInfo = INFO
    is_ready: bool = True
    num_restarts: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    ended: list[int] = field(default_factory=list)
    num_begun: int = 0

    def next_id(self) -> int:
        return 1

    def check_ready(self) -> None:
        if not self.is_ready:
            raise Unavailable("not ready")

    async def paint(self, order: Paint):
        self.num_begun += 1
        try:
            yield Progress(order.id, 0, 1, order.steps)
            await self.gate.wait()
            yield Picture(order.id, 0, b"picture")
            yield Ended(order.id)
        finally:
            self.ended.append(order.id)


async def all_of(service: PictureService, **wanted: object) -> list[Report]:
    asked = service.order(Wanted("x", **wanted))
    async with aclosing(service.reports(asked, "id")) as reports:
        return [report async for report in reports]


def test_the_queue_is_bounded():
    async def run() -> None:
        painter = FakePainter()
        service = PictureService(PictureCard("sd", ""), painter)
        tasks = [asyncio.create_task(all_of(service)) for _ in range(1 + MAX_WAITING)]
        while service.admission.num_waiting < MAX_WAITING:
            await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="1 requests are being served and 8 wait"):
            await all_of(service)
        painter.gate.set()
        assert [len(reports) for reports in await asyncio.gather(*tasks)] == [3] * 9
        assert service.meter.num_pictures == 9
        assert service.meter.num_failed == 1

    asyncio.run(run())


def test_who_leaves_while_waiting_or_running_ends_its_order():
    async def run() -> None:
        painter = FakePainter()
        service = PictureService(PictureCard("sd", ""), painter)
        tasks = [asyncio.create_task(all_of(service)) for _ in range(2)]
        while service.admission.num_waiting < 1:
            await asyncio.sleep(0)
        for task in reversed(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert painter.ended == [1]  # the other picture had not begun
        assert service.admission.num_active == 0
        assert service.meter.num_aborted == 2
        assert service.running() == []

    asyncio.run(run())


def test_an_operator_and_the_time_limit_end_a_request_at_once():
    async def run() -> None:
        painter = FakePainter()
        service = PictureService(PictureCard("sd", "", time_limit_s=0.05), painter)
        with pytest.raises(TimedOut, match=r"ended after 0.05 s, as e2eTimeout says"):
            await all_of(service)
        service = PictureService(PictureCard("sd", ""), painter)
        asked = asyncio.create_task(all_of(service))
        while painter.num_begun != 2:
            await asyncio.sleep(0)
        assert service.stop("id")
        with pytest.raises(GenerationFailed, match="the request was ended by an operator"):
            await asked
        assert painter.ended == [1, 1]
        assert service.admission.num_active == 0
        assert not service.stop("id")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ({"size": (1024, 1024), "seeds": (1, 2, 3, 4, 5)}, r"size: 5 of 1024x1024 are more than the 4194304 pixels"),
        ({"size": (8, 99992)}, None),
        ({"size": (60, 64)}, r"size: must be multiples of 8, got 60x64"),
    ],
)
def test_sizes_are_checked_before_anything_runs(wanted: dict[str, object], problem: str | None):
    service = PictureService(PictureCard("sd", ""), FakePainter())
    if problem is None:
        assert service.order(Wanted("x", **wanted)).height == 99992
        return
    with pytest.raises(BadRequest, match=problem):
        service.order(Wanted("x", **wanted))


@pytest.mark.parametrize(
    ("card", "wanted", "steps", "guidance"),
    [
        ({}, {}, 4, None),
        ({"steps": 30, "guidance": 0.0}, {}, 30, 0.0),
        ({"steps": 30, "guidance": 0.0}, {"steps": 7, "guidance": 3.0}, 7, 3.0),
        ({"steps": 30}, {"effort": 0.5}, 15, None),
        ({"steps": 1}, {"effort": 0.5}, 1, None),
        ({"steps": 150}, {"effort": 3.0}, 200, None),
        ({}, {"effort": 3.0, "steps": 7}, 7, None),
    ],
)
def test_steps_and_guidance_are_the_requests_then_the_configurations_then_the_pipelines(
    card: dict[str, object], wanted: dict[str, object], steps: int, guidance: float | None
):
    service = PictureService(PictureCard("sd", "", **card), FakePainter())
    order = service.order(Wanted("x", **wanted))
    assert (order.steps, order.guidance) == (steps, guidance)


def test_a_painter_sends_signs_of_life_from_its_start_on():
    ours, theirs = socket.socketpair()
    line = import_module("kvloom.images.main").Line(theirs)
    thread = threading.Thread(target=line.send_signs)
    thread.start()
    channel = Channel(ours, Sent)
    assert channel.receive(WAIT_S) == Pong()
    channel.close()
    thread.join()
    line.close()
