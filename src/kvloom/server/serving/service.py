"""GenerationService: runs each choice of a Generation as an engine request, and returns the deltas of each engine step.

Closing the generator of steps cancels all requests of a generation.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from kvloom.contract.capabilities import check_capable
from kvloom.contract.errors import BadRequest, ServingError, TimedOut, Unavailable
from kvloom.contract.request import FinishReason, Request
from kvloom.contract.sampling import SamplingParams
from kvloom.contract.tokenizer import Tokenizer
from kvloom.engine.feed import Feed, Step
from kvloom.server.errors import PromptTooLong
from kvloom.server.observe.meter import Asked, Meter
from kvloom.server.observe.timing import Timing
from kvloom.server.observe.tracing import CALLER, FINISH_NAMES, Trace, Tracer
from kvloom.server.serving.admission import Admission, Ticket
from kvloom.server.serving.beam_answers import BeamAnswers, BeamFeed
from kvloom.server.serving.card import ModelCard
from kvloom.server.serving.engine import EngineLike
from kvloom.server.serving.generation import (
    MAX_CHOICES,
    MAX_EMBEDDINGS,
    Generation,
)
from kvloom.server.serving.running import Running, Runs, aborted
from kvloom.server.serving.sleeping import Sleeper


class GenerationService:
    """Runs Generations on the engine of one model, with one of its adapters or none."""

    def __init__(
        self,
        card: ModelCard,
        engine: EngineLike,
        tokenizer: Tokenizer,
        admission: Admission,
        tracer: Tracer | None = None,
    ) -> None:
        self.card, self.engine, self.tokenizer = card, engine, tokenizer
        self.admission, self._tracer = admission, tracer
        self._runs = Runs(engine)
        self.meter = Meter()
        self.sleeper = Sleeper(card.name, engine, self._runs.__len__, self._runs.stop_all)
        self.adapter = 0  # as in engine.request.Request
        self.root = card.name  # `root` in /v1/models: the model's name; for an adapter its path
        self.parent: str | None = None  # name of its base model

    def with_adapter(self, name: str, path: str, adapter: int) -> "GenerationService":
        """The same model under another name, with an adapter of its engine. Both share slots, counters and ids."""
        card = replace(self.card, name=name)
        service = GenerationService(card, self.engine, self.tokenizer, self.admission, self._tracer)
        service._runs, service.meter, service.sleeper = self._runs, self.meter, self.sleeper
        service.adapter, service.root, service.parent = adapter, path, self.name
        return service

    def unload(self) -> None:
        """Unload this adapter, whose name is no longer served, once the generations that use it have ended."""
        self._runs.unload(self.adapter)

    @property
    def name(self) -> str:
        return self.card.name

    @property
    def max_input_tokens(self) -> int:
        """Longest prompt in tokens: as configured, or the context less maxIterTimes if that is set, else the context
        less one.
        """
        left = self.engine.max_seq_len - (self.card.engine.max_iter_times or 1)
        return min(self.card.max_input_tokens or left, self.engine.max_seq_len - 1)

    @property
    def max_output_tokens(self) -> int:
        """Longest answer in tokens."""
        return min(self.card.engine.max_iter_times or self.engine.max_seq_len, self.engine.max_seq_len - 1)

    def input_limit(self, params: SamplingParams) -> int:
        """Longest prompt of a request: the whole context where no answer is wanted."""
        return self.max_input_tokens if params.max_tokens != 0 else self.engine.max_seq_len

    def check(self, generation: Generation, field: str) -> None:
        """Raises BadRequest that names `field` when a prompt is empty or too long, before anything runs."""
        most = MAX_EMBEDDINGS if generation.pooling or generation.tails else MAX_CHOICES
        if generation.num_choices > most:
            raise BadRequest(field, f"asks for more than {most} answers in one request")
        limit = self.input_limit(generation.params)
        for prompt in generation.prompts:
            if not prompt:
                raise BadRequest(field, "must not be empty")
            length = len(prompt) + max((len(tail.ids) for tail in generation.tails), default=0)
            if length > limit:
                raise PromptTooLong(field, length, limit, self.engine.max_seq_len)

    def check_writes(self, field: str) -> None:
        """Raises BadRequest that names `field` when the model generates no text."""
        if why := self.engine.info.lacks.get("generation"):
            raise BadRequest(field, f"the engine of this model cannot do it: {why}")

    def check_ready(self) -> None:
        """Raises Unavailable."""
        self.sleeper.check_awake()
        if not self.engine.is_ready:
            raise Unavailable(f"the model {self.name} is not ready: it is starting, restarting or stopping")

    def running(self) -> list[Running]:
        """What is under way, oldest first."""
        return self._runs.oldest_first()

    def stop(self, id: str) -> bool:
        """End generations of this `id` with the tokens they have. Returns whether there were any."""
        return self._runs.stop(id)

    async def steps(
        self,
        generation: Generation,
        timing: Timing | None = None,
        silence_s: float | None = None,
        num_together: int = 1,
    ) -> AsyncGenerator[Step]:
        """The deltas of all choices as they arrive: a list of (choice, delta) for each engine step, or for
        `num_together` deltas of each choice after its first one.

        With `silence_s`, an empty list after so many seconds without a step. Each choice's last delta has a
        finish_reason; there are best_of choices a prompt. Closing the generator cancels them all. `timing` is kept up
        to date for the caller. Raises ServingError.
        """
        tally = _Tally(timing or Timing(), generation.num_choices)
        self.meter.received()
        try:
            check_capable(self.engine.info.lacks, generation, self.adapter)
            async with self._admitted(generation, tally.timing) as running:
                self._check_time(running)
                if running.ticket.is_stopped:  # stopped before the engine got it
                    step = [(i, aborted(request)) for i, request in enumerate(running.requests)]
                    self._count(tally, generation, step, [time.perf_counter()] * len(step))
                    yield step
                    return
                with self._open(running) as feed:
                    feed.gather(num_together)
                    if silence_s is not None:
                        feed.tell_silence(silence_s)
                    while (brought := await feed.get()) is not None:
                        self._check_time(running)
                        self._count(tally, generation, brought, feed.times_s)
                        yield brought
        except ServingError as problem:
            self.meter.failed(tally.timing)
            tally.error = problem.kind
            raise
        except (GeneratorExit, asyncio.CancelledError):
            self.meter.num_aborted += not tally.is_done
            raise
        finally:
            self._trace(tally, generation)

    def _check_time(self, running: Running) -> None:
        """Raises TimedOut."""
        if running.is_overdue:
            raise TimedOut(f"the request was ended after {self.card.time_limit_s:g} s, as e2eTimeout says")

    def _open(self, running: Running) -> Feed | BeamFeed:
        """The feed of its requests."""
        beams = running.generation.beams
        if beams is None:
            return self.engine.open(running.requests)
        return BeamFeed(BeamAnswers(beams, self.tokenizer, self.engine.max_seq_len), running, self.engine)

    def _count(self, tally: "_Tally", generation: Generation, step: Step, times_s: Sequence[float]) -> None:
        """Count the deltas of one step, and the time when each came."""
        for (choice, delta), time_s in zip(step, times_s, strict=True):
            if delta.token_ids:
                self.meter.token(tally.timing, choice, time_s)
            if delta.finish_reason is not None:
                tally.end(delta.finish_reason, delta.num_cached_tokens)
                if tally.is_done:
                    self._finish(tally, generation)

    def _finish(self, tally: "_Tally", generation: Generation) -> None:
        """All choices have ended: record the generation."""
        num_prompt = generation.num_prompt_tokens
        asked = Asked(num_prompt, tally.num_choices, generation.n, generation.params.max_tokens)
        num_computed = generation.num_request_tokens - tally.total_cached
        self.meter.finished(tally.timing, asked, tally.reasons, num_computed)

    def _trace(self, tally: "_Tally", generation: Generation) -> None:
        """Report an ended generation to the tracer; choices without an end were abandoned by the client."""
        if self._tracer is None:
            return
        num_prompt = generation.num_prompt_tokens
        names = [FINISH_NAMES[reason] for reason in tally.reasons]
        if not names and not tally.error:
            names = [FINISH_NAMES[FinishReason.ABORT]]
        numbers = (num_prompt, tally.num_cached, tally.timing)
        who = (CALLER.get(), generation.id, self.name, generation.params)
        self._tracer.ended(Trace(*who, *numbers, names, tally.error))

    @asynccontextmanager
    async def _admitted(self, generation: Generation, timing: Timing) -> AsyncIterator[Running]:
        """Wait for an admission slot, then make the engine requests; can be stopped meanwhile."""
        self.sleeper.check_awake()
        ticket = Ticket(num_tokens=generation.num_prompt_tokens)
        requests = _requests(generation, self._runs.next_serial(), self.adapter)
        item = Running(ticket, requests, generation, timing)
        with self._runs.added(item, self.card.time_limit_s) as running:
            async with self.admission.slot(ticket):
                timing.slot_given()
                yield running


@dataclass(slots=True)
class _Tally:
    """Progress of a generation, for meter and tracer."""

    timing: Timing
    num_choices: int
    reasons: list[FinishReason] = field(default_factory=list)
    num_cached: int = 0  # prompt tokens, of the choice with the fewest cached ones
    total_cached: int = 0  # tokens of all choices
    error: str = ""  # kind of the ServingError that ended it

    @property
    def is_done(self) -> bool:
        return len(self.reasons) == self.num_choices

    def end(self, reason: FinishReason, num_cached: int) -> None:
        """A choice has ended."""
        self.reasons.append(reason)
        self.num_cached = num_cached if len(self.reasons) == 1 else min(self.num_cached, num_cached)
        self.total_cached += num_cached


def _requests(generation: Generation, serial: int, adapter: int) -> list[Request]:
    """best_of engine requests for each prompt; a given seed is turned into a different one for each.

    Ids are unique in the engine, whatever the caller's id. Where the best must be chosen, log-probabilities are
    requested.
    """
    requests: list[Request] = []
    given = generation.params
    if generation.best_of > generation.n and given.logprobs is None:
        given = replace(given, logprobs=0)
    prompts = [generation.prompt_of(i) for i in range(0, generation.num_choices, generation.best_of)]
    seconds = generation.seconds or (0,) * len(prompts)
    for index, (prompt, second) in enumerate(zip(prompts, seconds, strict=True)):
        if generation.tails:
            given = replace(given, scored_from=len(prompt) - generation.tails[index].num_scored)
        for i in range(generation.best_of):
            params = given
            if params.seed is not None and i:
                params = replace(params, seed=(params.seed + i) % 2**63)
            id = f"{generation.id}-{serial}-{len(requests)}"
            salt, pooling = generation.cache_salt, generation.pooling
            who = (salt, generation.tenant, generation.priority)
            request = Request(id, prompt, params, *who, pooling=pooling, adapter=adapter, second=second)
            more = (generation.gives_kv, generation.kv_location, generation.sight, generation.prediction)
            requests.append(replace(request, gives_kv=more[0], kv_location=more[1], sight=more[2], prediction=more[3]))
    return requests
