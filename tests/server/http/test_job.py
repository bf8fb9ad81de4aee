"""`answer`, the loop that runs all jobs: one frame a step, errors before and after the first frame, work beside it."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import GenerationFailed, ServingError
from kvloom.contract.request import Delta, FinishReason
from kvloom.contract.sampling import SamplingParams
from kvloom.server.errors import BUG_TEXT
from kvloom.server.http.job import Folding, Job, answer
from kvloom.server.http.reply import Reply
from kvloom.server.serving.card import ModelCard
from kvloom.server.serving.generation import Generation

GENERATION = Generation("g", ((1, 2),), SamplingParams(), 2, 2)
STEPS = [
    [(0, Delta("a", "a", (1,))), (1, Delta("b", "b", (1,)))],
    [(1, Delta("b", "d", (1,), finish_reason=FinishReason.EOS))],
    [(0, Delta("a", "c", (1,), finish_reason=FinishReason.EOS))],
]


class Plain(Folding):
    """A writer that returns what it is given."""

    def add(self, choice: int, delta: Delta) -> bytes:
        return f"{choice}{delta.text}".encode()

    def end(self) -> bytes:
        return b"."

    def error(self, error: ServingError) -> bytes:
        return f"!{error}".encode()

    def whole(self) -> Reply:
        return Reply(",".join(answer.text for answer in self.answers).encode())


class Steps:
    """Stands for a service: yields these steps, then fails with `error`."""

    def __init__(self, steps: list[Any], error: Exception | None = None) -> None:
        self._steps, self._error = steps, error
        self.card = ModelCard("m", EngineConfig(backend="fake"))
        self.is_closed = False

    async def steps(
        self, generation: Generation, timing: object, silence_s: float | None = None, num_together: int = 1
    ) -> AsyncGenerator[Any]:
        try:
            for step in self._steps:
                yield step
            if self._error is not None:
                raise self._error
        finally:
            self.is_closed = True


class Beside:
    """Handles every error itself."""

    def __init__(self) -> None:
        self.errors: list[BaseException | None] = []

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        self.errors.append(error)
        return isinstance(error, ServingError)


def job(service: Any, is_streamed: bool = True, **more: Any) -> Job:
    return Job(service, GENERATION, Plain(GENERATION), is_streamed, **more)


async def writes(reply: Reply) -> list[bytes]:
    assert reply.frames is not None
    return [reply.body, *[frame async for frame in reply.frames]]


def streamed(service: Steps, **more: Any) -> list[bytes]:
    async def run() -> list[bytes]:
        return await writes(await answer(job(service, **more)))

    return asyncio.run(run())


def test_what_a_step_brings_to_one_request_is_one_write():
    assert streamed(Steps(STEPS)) == [b"0a1b", b"1d", b"0c", b"."]


def test_a_whole_answer_is_folded_of_the_same_deltas():
    assert asyncio.run(answer(job(Steps(STEPS), is_streamed=False))).body == b"ac,bd"


@pytest.mark.parametrize("is_streamed", [True, False])
def test_an_error_before_the_first_frame_is_the_callers(is_streamed: bool):
    with pytest.raises(GenerationFailed):
        asyncio.run(answer(job(Steps([], GenerationFailed("it broke")), is_streamed)))


def test_a_later_error_ends_the_stream():
    assert streamed(Steps(STEPS[:1], GenerationFailed("it broke"))) == [b"0a1b", b"!it broke"]


def test_a_mistake_of_ours_ends_the_stream_in_the_same_way(caplog: pytest.LogCaptureFixture):
    assert streamed(Steps(STEPS[:1], ZeroDivisionError())) == [b"0a1b", b"!" + BUG_TEXT.encode()]
    assert "a stream failed" in caplog.text


def test_who_closes_the_frames_cancels_the_generation():
    async def run(service: Any) -> bool:
        reply = await answer(job(service))
        assert reply.frames is not None
        await reply.frames.aclose()
        return bool(service.is_closed)

    assert asyncio.run(run(Steps(STEPS)))


@pytest.mark.parametrize(("error", "end"), [(None, b"."), (GenerationFailed("it broke"), b".")])
def test_what_stands_beside_is_left_before_the_end_and_may_take_an_error(error: Exception | None, end: bytes):
    beside = Beside()
    assert streamed(Steps(STEPS[:1], error), beside=beside) == [b"0a1b", end]
    assert beside.errors == [error]


def test_prompts_that_are_told_count_as_what_is_written(monkeypatch: pytest.MonkeyPatch):
    counts: list[int] = []

    async def counted(count: int, make: Any) -> Any:
        counts.append(count)
        return make()

    monkeypatch.setattr("kvloom.server.http.job.formatted", counted)
    streamed(Steps(STEPS), tells_prompt=True)
    assert counts == [2 + 2 * 2, 1, 1]
    asyncio.run(answer(job(Steps(STEPS), is_streamed=False, tells_prompt=True)))
    assert counts[-1] == 4 + GENERATION.num_prompt_tokens


def test_a_step_whose_deltas_say_nothing_is_no_write():
    class Quiet(Plain):
        def add(self, choice: int, delta: Delta) -> bytes:
            return b"" if delta.finish_reason is None else b"x"

    async def run() -> list[bytes]:
        service: Any = Steps(STEPS)
        return await writes(await answer(Job(service, GENERATION, Quiet(GENERATION), True)))

    assert asyncio.run(run()) == [b"x", b"x", b"."]
