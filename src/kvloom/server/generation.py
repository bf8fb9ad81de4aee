"""Generation: the one neutral request behind every dialect, and its stream.

A dialect parses its body into a Generation; the service runs it as one engine request a choice and gives back deltas
with the index of their choice. Closing the stream cancels all of them.
"""

import asyncio
import copy
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Set
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from kvloom.engine.adapters import Adapter
from kvloom.engine.batch import RankInfo
from kvloom.engine.errors import BadRequest, ServingError, Unavailable
from kvloom.engine.request import Delta, FinishReason, Request, SamplingParams, TokenLogprob
from kvloom.engine.stats import Stats
from kvloom.server.admission import Admission, Ticket
from kvloom.server.card import ModelCard
from kvloom.server.meter import Meter
from kvloom.server.timing import Timing
from kvloom.server.tracing import CALLER, FINISH_NAMES, Trace, Tracer

MAX_CHOICES = 1024  # answers to one HTTP request
MAX_EMBEDDINGS = 2048  # OpenAI's limit


class EngineLike(Protocol):
    """What the server needs of an EngineThread."""

    @property
    def max_seq_len(self) -> int: ...
    @property
    def is_ready(self) -> bool: ...
    @property
    def info(self) -> RankInfo: ...
    def stats(self) -> Stats: ...
    def stream(self, request: Request) -> AsyncGenerator[Delta]: ...
    def abort(self, request_id: str) -> None: ...
    async def load_adapter(self, path: str) -> Adapter: ...
    def unload_adapter(self, adapter: int) -> None: ...


class TokenizerLike(Protocol):
    """What the server needs of a tokenizer."""

    @property
    def eos_ids(self) -> Set[int]: ...
    @property
    def vocab_size(self) -> int: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def token_text(self, token_id: int) -> str: ...
    def is_special(self, token_id: int) -> bool: ...
    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> str: ...
    def chat_template(self, has_tools: bool = False) -> str: ...


@dataclass(frozen=True, slots=True)
class Generation:
    """Choices 0 .. len(prompts) * n - 1, prompt by prompt. best_of answers are made a prompt, the n best are given.

    With a `pooling` each choice is its prompt's embedding, as engine.request.Request has it.

    `id` is the caller's; several generations may run under one id, and stop together.
    """

    id: str
    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams
    n: int = 1
    best_of: int = 1
    priority: int = 0  # as engine.request.Request's
    tenant: str = ""
    pooling: str = ""
    cache_salt: str = ""


@dataclass(slots=True)
class Answer:
    """One choice, whole."""

    prompt_ids: tuple[int, ...]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    token_texts: list[str] = field(default_factory=list)  # what each token added to the text
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    seed: int | None = None
    embedding: bytes | None = None  # as engine.request.Delta's
    timing: Timing = field(default_factory=Timing)  # of the whole generation

    def add(self, delta: Delta) -> None:
        if delta.token_ids:
            self.token_texts += [delta.text] + [""] * (len(delta.token_ids) - 1)
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self.num_cached_tokens, self.seed = delta.num_cached_tokens, delta.seed
        self.embedding = delta.embedding


@dataclass(slots=True, eq=False)
class Running:
    """One generation under way: its place, its engine requests once it has one, and how far it is."""

    ticket: Ticket
    requests: list[Request]
    generation: Generation
    timing: Timing


class GenerationService:
    """Runs Generations on the engine of one model, with one of its adapters or none."""

    def __init__(
        self,
        card: ModelCard,
        engine: EngineLike,
        tokenizer: TokenizerLike,
        admission: Admission,
        tracer: Tracer | None = None,
    ) -> None:
        self.card, self.engine, self.tokenizer = card, engine, tokenizer
        self.admission, self._tracer = admission, tracer
        self._running: dict[str, set[Running]] = {}
        self._serial = itertools.count()
        self.meter = Meter()
        self.adapter = 0  # as engine.request.Request's
        self.root = card.name  # as /v1/models tells it; of an adapter its path
        self.parent: str | None = None  # and its model

    def with_adapter(self, name: str, path: str, adapter: int) -> "GenerationService":
        """The same model under another name, with an adapter of its engine; they share places, counts and ids."""
        service = copy.copy(self)
        service.card, service.adapter = replace(self.card, name=name), adapter
        service.root, service.parent = path, self.name
        return service

    @property
    def name(self) -> str:
        return self.card.name

    @property
    def max_input_tokens(self) -> int:
        """Longest prompt: what maxIterTimes, when set, leaves of the context (seed 001, 3.3.2); else all but one."""
        return self.engine.max_seq_len - (self.card.engine.max_iter_times or 1)

    @property
    def max_output_tokens(self) -> int:
        """Longest answer."""
        return min(self.card.engine.max_iter_times or self.engine.max_seq_len, self.engine.max_seq_len - 1)

    def check(self, generation: Generation, field: str) -> None:
        """Raise BadRequest naming `field` when a prompt is empty or too long, before anything runs."""
        most = MAX_EMBEDDINGS if generation.pooling else MAX_CHOICES
        if len(generation.prompts) * generation.best_of > most:
            raise BadRequest(field, f"asks for more than {most} answers in one request")
        limit = self.max_input_tokens if generation.params.max_tokens != 0 else self.engine.max_seq_len
        for prompt in generation.prompts:
            if not prompt:
                raise BadRequest(field, "must not be empty")
            if len(prompt) > limit:
                raise BadRequest(field, f"has {len(prompt)} tokens; prompts have at most {limit} here")

    def check_ready(self) -> None:
        """Raises Unavailable."""
        if not self.engine.is_ready:
            raise Unavailable(f"the model {self.name} is not ready: it is starting, restarting or stopping")

    def running(self) -> list[Running]:
        """What is under way, oldest first."""
        items = [item for same_id in self._running.values() for item in same_id]
        return sorted(items, key=lambda item: -item.timing.age_s)

    def stop(self, id: str) -> bool:
        """End what runs under `id` with the tokens it has; whether there was anything."""
        running = self._running.get(id, ())
        for item in running:
            item.ticket.stop()
            for request in item.requests:
                self.engine.abort(request.id)
        return bool(running)

    def stream(self, generation: Generation, timing: Timing | None = None) -> AsyncGenerator[tuple[int, Delta]]:
        """(choice, delta) of all choices as they come; each choice's last delta has a finish_reason.

        `timing` is kept up to date for the caller. Raises ServingError from the first step on.
        """
        return self._run(generation, generation.n, timing or Timing())

    async def collect(self, generation: Generation) -> list[Answer]:
        """All choices, whole; of best_of answers to a prompt the n of highest mean log-probability, best first."""
        count = generation.best_of
        if count > generation.n:
            scored = replace(generation.params, logprobs=generation.params.logprobs or 0)
            generation = replace(generation, params=scored)
        timing = Timing()
        answers = [Answer(prompt, timing=timing) for prompt in generation.prompts for _ in range(count)]
        async with aclosing(self._run(generation, count, timing)) as deltas:
            async for choice, delta in deltas:
                answers[choice].add(delta)
        groups = (answers[i : i + count] for i in range(0, len(answers), count))
        return [answer for group in groups for answer in _best(group, generation.n)]

    async def _run(self, generation: Generation, count: int, timing: Timing) -> AsyncGenerator[tuple[int, Delta]]:
        """`count` choices a prompt, timed, counted and traced."""
        reasons: list[FinishReason] = []
        num_cached, error = 0, ""
        num_choices = len(generation.prompts) * count
        self.meter.num_received += 1
        try:
            async with self._place(generation, count, timing) as running, aclosing(self._merge(running)) as deltas:
                async for choice, delta in deltas:
                    if delta.token_ids and timing.token():
                        self.meter.began(timing)
                    if delta.finish_reason is not None:
                        reasons.append(delta.finish_reason)
                        num_cached = max(num_cached, delta.num_cached_tokens)
                        if len(reasons) == num_choices:
                            self.meter.finished(timing, sum(map(len, generation.prompts)), num_choices, reasons)
                    yield choice, delta
        except ServingError as problem:
            self.meter.num_failed += 1
            error = problem.kind
            raise
        except (GeneratorExit, asyncio.CancelledError):
            self.meter.num_aborted += len(reasons) < num_choices
            raise
        finally:
            if self._tracer is not None:
                self._trace(self._tracer, generation, timing, num_cached, reasons, error)

    def _trace(
        self,
        tracer: Tracer,
        generation: Generation,
        timing: Timing,
        num_cached: int,
        reasons: list[FinishReason],
        error: str,
    ) -> None:
        """Tell the tracer of a generation that has ended; choices without an end were given up by the client."""
        num_prompt = sum(map(len, generation.prompts))
        names = [FINISH_NAMES[reason] for reason in reasons] or ([] if error else [FINISH_NAMES[FinishReason.ABORT]])
        trace = Trace(
            CALLER.get(), generation.id, self.name, generation.params, num_prompt, num_cached, timing, names, error
        )
        tracer.ended(trace)

    @asynccontextmanager
    async def _place(self, generation: Generation, count: int, timing: Timing) -> AsyncIterator[Running]:
        """A place among those served, and the engine requests to run in it; stoppable meanwhile."""
        ticket = Ticket(num_tokens=sum(map(len, generation.prompts)))
        requests = _requests(generation, count, next(self._serial), self.adapter)
        running = Running(ticket, requests, generation, timing)
        same_id = self._running.setdefault(generation.id, set())
        same_id.add(running)
        try:
            async with self.admission.place(ticket):
                timing.place_given()
                yield running
        finally:
            same_id.discard(running)
            if not same_id:
                self._running.pop(generation.id, None)

    async def _merge(self, running: Running) -> AsyncGenerator[tuple[int, Delta]]:
        if len(running.requests) == 1:
            async with aclosing(self._deltas(running, 0)) as deltas:
                async for delta in deltas:
                    yield 0, delta
            return
        queue: asyncio.Queue[tuple[int, Delta] | ServingError] = asyncio.Queue()
        tasks = [asyncio.create_task(self._pump(running, i, queue)) for i in range(len(running.requests))]
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
        self, running: Running, choice: int, queue: "asyncio.Queue[tuple[int, Delta] | ServingError]"
    ) -> None:
        try:
            async with aclosing(self._deltas(running, choice)) as deltas:
                async for delta in deltas:
                    queue.put_nowait((choice, delta))
        except ServingError as error:
            queue.put_nowait(error)

    async def _deltas(self, running: Running, choice: int) -> AsyncGenerator[Delta]:
        request = running.requests[choice]
        if running.ticket.is_stopped:  # before the engine has heard of it
            yield Delta(request.id, finish_reason=FinishReason.ABORT)
            return
        async with aclosing(self.engine.stream(request)) as deltas:
            async for delta in deltas:
                yield delta


def _requests(generation: Generation, count: int, serial: int, adapter: int) -> list[Request]:
    """`count` engine requests a prompt; with a seed given, each of them gets one of its own, derived from it.

    Their ids are unique in the engine whatever the caller's id is.
    """
    requests: list[Request] = []
    for prompt in generation.prompts:
        for i in range(count):
            params = generation.params
            if params.seed is not None and i:
                params = replace(params, seed=(params.seed + i) % 2**63)
            id = f"{generation.id}-{serial}-{len(requests)}"
            salt, pooling = generation.cache_salt, generation.pooling
            request = Request(id, prompt, params, salt, generation.tenant, generation.priority, pooling=pooling)
            request = replace(request, adapter=adapter) if adapter else request
            requests.append(request)
    return requests


def _best(answers: list[Answer], count: int) -> list[Answer]:
    if len(answers) == count:
        return answers
    ranked = sorted(answers, key=lambda a: -sum(t.logprob for t in a.logprobs) / max(1, len(a.logprobs)))
    return ranked[:count]
