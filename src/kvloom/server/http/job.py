"""Job and Writer: what a dialect makes of a request, without I/O; `answer`: the one loop that runs the jobs of all."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import dataclass, field
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
    """Writes one answer from the deltas of its choices; knows no socket, no engine and no task, and can be pickled.

    A stream is add, add, ..., end; a whole answer is fold, fold, ..., whole. Of the same deltas, cut anywhere, the
    frames of the one say what the body of the other says.
    """

    def add(self, choice: int, delta: Delta) -> bytes:
        """The frames that one more delta of a choice makes; b"" where there is nothing to say yet."""
        ...

    def end(self) -> bytes:
        """What closes the stream after the last delta of every choice."""
        ...

    def error(self, error: ServingError) -> bytes:
        """What closes the stream when an error ends it after its first frame."""
        ...

    def fold(self, choice: int, delta: Delta) -> None:
        """Take one more delta of a choice into the whole answer."""
        ...

    def whole(self) -> Reply:
        """The answer in one body, after the last delta of every choice. Raises ServingError."""
        ...


class Folding(ABC):
    """The part of a Writer that folds each choice into an Answer. Its streams have no end of their own."""

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
    """Of what is never streamed: its stream would be one frame, the body."""

    def add(self, choice: int, delta: Delta) -> bytes:
        self.fold(choice, delta)
        return b""

    def end(self) -> bytes:
        return self.whole().body

    def error(self, error: ServingError) -> bytes:
        return b""  # nothing was sent before: the error has a status


@dataclass(frozen=True, slots=True)
class Job:
    """A request, parsed: what runs on which model, and who writes the answer.

    With `tells_prompt` the prompts are part of the answer.
    `timing` is kept up to date while the job runs; its writer may read it. `beside` is entered while the deltas come:
    it is left before the end is written, and may take a ServingError upon itself.
    """

    service: GenerationService
    generation: Generation
    writer: Writer
    is_streamed: bool = False
    tells_prompt: bool = False
    media_type: str = sse.MEDIA_TYPE  # of a stream
    keep_alive: bytes = sse.KEEP_ALIVE  # what a stream says that has begun and is silent; b"" = nothing
    timing: Timing = field(default_factory=Timing)
    beside: AbstractAsyncContextManager[object, bool | None] = field(default_factory=nullcontext)


async def answer(job: Job) -> Reply:
    """Run a job: its reply is whole, or a stream whose first frames are there already.

    Raises ServingError before anything is answered, so that the error has a status.
    """
    if job.is_streamed:
        return await begun(_frames(job), job.media_type)
    count = job.generation.num_prompt_tokens if job.tells_prompt else 0
    async with job.beside, aclosing(job.service.steps(job.generation, job.timing)) as steps:
        async for step in steps:
            for choice, delta in step:
                count += num_items(delta)
                job.writer.fold(choice, delta)
    return await formatted(count, job.writer.whole)


async def _frames(job: Job) -> AsyncGenerator[bytes]:
    """The answer as it comes: one item for all that an engine step brought. Closing it cancels the generation.

    An error before the first item raises; a later one becomes the stream's end.
    """
    writer, has_begun = job.writer, False
    untold = set(range(job.generation.num_choices)) if job.tells_prompt else set()  # choices whose prompt is to be told
    try:
        silence_s = sse.KEEP_ALIVE_S if job.keep_alive else None
        async with job.beside, aclosing(job.service.steps(job.generation, job.timing, silence_s)) as steps:
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
    except Exception as problem:  # whatever it is, the client is told
        yield last_frame(problem, has_begun, writer.error)


def _written(writer: Writer, step: Step) -> bytes:
    return b"".join([writer.add(choice, delta) for choice, delta in step])
