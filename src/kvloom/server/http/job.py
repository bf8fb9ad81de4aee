"""Job and Writer: what a dialect makes of a request, without I/O; `answer`: the one loop that runs all jobs."""

import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from kvloom.contract.errors import ServingError
from kvloom.contract.request import Delta
from kvloom.engine.feed import Step
from kvloom.server.http import sse
from kvloom.server.http.formatting import formatted
from kvloom.server.http.reply import Reply
from kvloom.server.http.streaming import begun, last_frame
from kvloom.server.observe.timing import Timing
from kvloom.server.serving.generation import Answer, Generation, empty_answers, num_items
from kvloom.server.serving.service import GenerationService


class Writer(Protocol):
    """Writes one answer from the deltas of its choices; knows no socket, engine or task, and can be pickled.

    For a stream: add, add, ..., end; for a whole answer: fold, fold, ..., whole. From the same deltas, cut anywhere,
    the frames of a stream and the body of a whole answer say the same.
    """

    def add(self, choice: int, delta: Delta) -> bytes:
        """The frames for one more delta of a choice; b"" when there is nothing to send yet."""
        ...

    def end(self) -> bytes:
        """The end of the stream, after the last delta of every choice."""
        ...

    def error(self, error: ServingError) -> bytes:
        """The end of a stream that fails after its first frame."""
        ...

    def fold(self, choice: int, delta: Delta) -> None:
        """Add one more delta of a choice to the whole answer."""
        ...

    def whole(self) -> Reply:
        """The answer as one body, after the last delta of every choice. Raises ServingError."""
        ...


class Folding(ABC):
    """The part of a Writer that folds each choice into an Answer. Its streams have no closing frame."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.answers: list[Answer] = empty_answers(generation)

    def end(self) -> bytes:
        return b""

    def fold(self, choice: int, delta: Delta) -> None:
        self.answers[choice].add(delta)

    @abstractmethod
    def whole(self) -> Reply: ...


class WholeWriter(Folding):
    """A Writer of answers that are never streamed: its stream is one frame, the body."""

    def add(self, choice: int, delta: Delta) -> bytes:
        self.fold(choice, delta)
        return b""

    def end(self) -> bytes:
        return self.whole().body

    def error(self, error: ServingError) -> bytes:
        return b""  # nothing was sent before, so the error has a status


@dataclass(frozen=True, slots=True)
class Job:
    """A parsed request: what runs on which model, and the Writer of its answer.

    With `tells_prompt` the prompts are part of the answer. `timing` is kept up to date while the job runs; its writer
    may read it. `beside` is a context around the deltas: it is left before the end is written, and may swallow a
    ServingError. `notes` say what of the request was left out.
    """

    service: GenerationService
    generation: Generation
    writer: Writer
    is_streamed: bool = False
    tells_prompt: bool = False
    media_type: str = sse.MEDIA_TYPE  # media type of a stream
    keep_alive: bytes = sse.KEEP_ALIVE  # sent by a stream that has begun and is silent; b"" = nothing
    timing: Timing = field(default_factory=Timing)
    beside: AbstractAsyncContextManager[object, bool | None] = field(default_factory=nullcontext)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class JobAndMore:
    """A job, and what its endpoint needs beside it."""

    job: Job


# Deltas of each choice that a whole answer is told of at once: it costs less, and the list of running requests still
# shows how it goes on.
_TOGETHER = 16
NOTES_HEADER = "x-warning"
log = logging.getLogger(__name__)


async def answer(job: Job) -> Reply:
    """Run a job. The reply is whole, or a stream whose first frames are ready; its header NOTES_HEADER has the notes.

    Raises ServingError before the reply, so that the error gets a status.
    """
    reply = await _answer(job)
    if not job.notes:
        return reply
    told = "; ".join(job.notes)
    log.info("%s", told)
    return replace(reply, headers={**reply.headers, NOTES_HEADER: told})


async def _answer(job: Job) -> Reply:
    if job.is_streamed:
        return await begun(_frames(job), job.media_type)
    count = job.generation.num_prompt_tokens if job.tells_prompt else 0
    told = job.service.steps(job.generation, job.timing, num_together=_TOGETHER)
    async with job.beside, aclosing(told) as steps:
        async for step in steps:
            for choice, delta in step:
                count += num_items(delta)
                job.writer.fold(choice, delta)
    return await formatted(count, job.writer.whole)


async def _frames(job: Job) -> AsyncGenerator[bytes]:
    """The frames of the answer, one item for each engine step, or for `streamInterval` tokens. Closing the generator
    cancels the generation.

    An error before the first item raises; a later one becomes the stream's end.
    """
    writer, has_begun = job.writer, False
    # choices whose prompt was not written yet
    untold = set(range(job.generation.num_choices)) if job.tells_prompt else set()
    try:
        silence_s = sse.KEEP_ALIVE_S if job.keep_alive else None
        told = job.service.steps(job.generation, job.timing, silence_s, job.service.card.stream_interval)
        async with job.beside, aclosing(told) as steps:
            async for step in steps:
                if not step and has_begun:
                    yield job.keep_alive
                    continue
                count = 0
                for choice, delta in step:
                    count += num_items(delta)
                    if choice in untold:
                        untold.discard(choice)
                        count += len(job.generation.prompt_of(choice))
                frames = await formatted(count, partial(_written, writer, step))
                if frames:
                    has_begun = True
                    yield frames
        yield writer.end()
    except Exception as problem:  # whatever it is, the client gets an error
        yield last_frame(problem, has_begun, writer.error)


def _written(writer: Writer, step: Step) -> bytes:
    return b"".join([writer.add(choice, delta) for choice, delta in step])
