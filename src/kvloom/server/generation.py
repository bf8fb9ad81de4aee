"""Generation: the one neutral request behind every dialect, and its stream.

A dialect parses its body into a Generation; the service runs it as one engine request a choice and gives back deltas
with the index of their choice. Closing the stream cancels all of them.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from kvloom.engine.errors import BadRequest, Overloaded, ServingError
from kvloom.engine.request import Delta, FinishReason, Request, SamplingParams, TokenLogprob
from kvloom.engine.stats import Stats

MAX_CHOICES = 1024  # answers to one HTTP request


class EngineLike(Protocol):
    """What the server needs of an EngineThread."""

    @property
    def max_seq_len(self) -> int: ...
    @property
    def is_ready(self) -> bool: ...
    def stats(self) -> Stats: ...
    def stream(self, request: Request) -> AsyncGenerator[Delta]: ...


class TokenizerLike(Protocol):
    """What the server needs of a tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def is_special(self, token_id: int) -> bool: ...
    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> str: ...


@dataclass(frozen=True, slots=True)
class Generation:
    """Choices 0 .. len(prompts) * n - 1, prompt by prompt. best_of answers are made a prompt, the n best are given."""

    id: str
    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams
    n: int = 1
    best_of: int = 1


@dataclass(slots=True)
class Answer:
    """One choice, whole."""

    prompt_ids: tuple[int, ...]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    seed: int | None = None

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self.num_cached_tokens, self.seed = delta.num_cached_tokens, delta.seed


class Admission:
    """At most `limit` generations at once; twice as many wait in order; the next is refused (the seed's maxLinkNum)."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_active = 0
        self._places = asyncio.Semaphore(limit)

    @property
    def is_full(self) -> bool:
        return self.num_active >= 3 * self.limit

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for a place. Raises Overloaded when too many wait already."""
        if self.is_full:
            raise Overloaded(f"{self.limit} requests are being served and {2 * self.limit} wait; try again later")
        self.num_active += 1
        try:
            async with self._places:
                yield
        finally:
            self.num_active -= 1


class GenerationService:
    """Runs Generations on one engine."""

    def __init__(self, engine: EngineLike, tokenizer: TokenizerLike, max_link_num: int) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.admission = Admission(max_link_num)

    def check(self, generation: Generation, field: str) -> None:
        """Raise BadRequest naming `field` when a prompt is empty or too long, before anything runs."""
        if len(generation.prompts) * generation.best_of > MAX_CHOICES:
            raise BadRequest(field, f"asks for more than {MAX_CHOICES} answers in one request")
        limit = self.engine.max_seq_len
        for prompt in generation.prompts:
            if not prompt:
                raise BadRequest(field, "must not be empty")
            if len(prompt) + (generation.params.max_tokens != 0) > limit:
                raise BadRequest(field, f"has {len(prompt)} tokens; prompt and answer must fit in {limit}")

    async def stream(self, generation: Generation) -> AsyncGenerator[tuple[int, Delta]]:
        """(choice, delta) of all choices as they come; each choice's last delta has a finish_reason."""
        requests = _requests(generation, generation.n)
        async with self.admission.place(), aclosing(self._merge(requests)) as deltas:
            async for item in deltas:
                yield item

    async def collect(self, generation: Generation) -> list[Answer]:
        """All choices, whole; of best_of answers to a prompt the n of highest mean log-probability, best first."""
        if generation.best_of > generation.n:
            scored = replace(generation.params, logprobs=generation.params.logprobs or 0)
            generation = replace(generation, params=scored)
        requests = _requests(generation, generation.best_of)
        answers = [Answer(request.prompt_ids) for request in requests]
        async with self.admission.place(), aclosing(self._merge(requests)) as deltas:
            async for choice, delta in deltas:
                answers[choice].add(delta)
        groups = (answers[i : i + generation.best_of] for i in range(0, len(answers), generation.best_of))
        return [answer for group in groups for answer in _best(group, generation.n)]

    async def _merge(self, requests: list[Request]) -> AsyncGenerator[tuple[int, Delta]]:
        if len(requests) == 1:
            async with aclosing(self.engine.stream(requests[0])) as deltas:
                async for delta in deltas:
                    yield 0, delta
            return
        queue: asyncio.Queue[tuple[int, Delta] | ServingError] = asyncio.Queue()
        tasks = [asyncio.create_task(self._pump(i, request, queue)) for i, request in enumerate(requests)]
        try:
            num_open = len(tasks)
            while num_open:
                item = await queue.get()
                if isinstance(item, ServingError):
                    raise item
                num_open -= item[1].finish_reason is not None
                yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(
        self, choice: int, request: Request, queue: "asyncio.Queue[tuple[int, Delta] | ServingError]"
    ) -> None:
        try:
            async with aclosing(self.engine.stream(request)) as deltas:
                async for delta in deltas:
                    queue.put_nowait((choice, delta))
        except ServingError as error:
            queue.put_nowait(error)


def _requests(generation: Generation, count: int) -> list[Request]:
    """`count` engine requests a prompt; with a seed given, each of them gets one of its own, derived from it."""
    requests: list[Request] = []
    for prompt in generation.prompts:
        for i in range(count):
            params = generation.params
            if params.seed is not None and i:
                params = replace(params, seed=(params.seed + i) % 2**63)
            requests.append(Request(f"{generation.id}-{len(requests)}", prompt, params))
    return requests


def _best(answers: list[Answer], count: int) -> list[Answer]:
    if len(answers) == count:
        return answers
    ranked = sorted(answers, key=lambda a: -sum(t.logprob for t in a.logprobs) / max(1, len(a.logprobs)))
    return ranked[:count]
