"""Engines over the fake model whose ranks die: at a chosen step, or whenever they compute a poisonous request."""

import threading
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from typing import Any

from kvloom.contract.config import EngineConfig, TierConfig
from kvloom.contract.errors import ModelError
from kvloom.contract.messages import AdapterInfo, Batch, Runner, StepOutput
from kvloom.contract.request import Delta, Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.engine import Engine
from kvloom.engine.link.executor import InProcessExecutor, RankDied, max_submitted
from kvloom.rank.fake import ByteTokenizer, FakeRunner, fake_answer
from kvloom.rank.tier.tier import TieredRunner
from kvloom.rank.tier.watch import Watch
from tests.support.engine.engines import text_of, tokens_of
from tests.support.engine.tiers import FakeTier

Kills = Callable[[Batch], bool]
_LOST = StepOutput([], [], 0.0)


def spares(batch: Batch) -> bool:
    return False


class MortalExecutor(InProcessExecutor):
    """Calls to a dead rank raise RankDied until `restart`. `kills`: whether a step kills it; results of earlier
    steps still arrive. Every other time the step after the fatal one can still be sent.
    """

    def __init__(self, make: Callable[[], Runner], kills: Kills = spares, max_submitted: int = 1) -> None:
        super().__init__(make(), max_submitted)
        self._make = make
        self.kills = kills
        self.took: Callable[[Batch], float] | None = None  # the time that a step reports; None = its real time
        self.is_dead = self.is_silent = self.has_lost_all = False
        self.batches: list[Batch] = []

    def die(self) -> None:
        """Kills the rank between two calls, from any thread; results of steps under way are lost."""
        self.is_dead = self.has_lost_all = True

    def submit(self, batch: Batch) -> None:
        self.batches.append(batch)
        if self.is_dead and self.is_silent:
            self._outputs.append(_LOST)
            return
        self._check()
        super().submit(batch)
        if self.took is not None:
            self._outputs[-1].compute_s = self.took(batch)
        if self.kills(batch):
            self.is_dead, self.is_silent = True, len(self.batches) % 2 == 0
            self._outputs[-1] = _LOST

    def collect(self) -> StepOutput:
        output = super().collect()
        if output is _LOST or self.has_lost_all:
            raise RankDied("dead")
        return output

    def load_adapter(self, id: int, path: str) -> AdapterInfo:
        self._check()
        return super().load_adapter(id, path)

    def unload_adapter(self, id: int) -> None:
        self._check()
        super().unload_adapter(id)

    def restart(self) -> None:
        super().__init__(self._make(), self.max_submitted)
        self.is_dead = self.is_silent = self.has_lost_all = False

    def _check(self) -> None:
        if self.is_dead:
            raise RankDied("dead")


def mortal_engine(
    kills: Kills = spares, stored: dict[bytes, list[int]] | None = None, **fields: Any
) -> tuple[Engine, MortalExecutor]:
    """A small engine with `fields` of EngineConfig. With `stored`, blocks by key, it has an outer KV tier that keeps
    them.
    """
    sizes = {"num_blocks": 64, "block_size": 4, "max_seq_len": 64, "seed": 5}
    tier = None if stored is None else TierConfig("tests.support.engine.tiers:FakeTier", timeout_s=1.0)
    config = EngineConfig(backend="fake", kv_tier=tier, **{**sizes, **fields})

    def make() -> Runner:
        runner = FakeRunner(config)
        if stored is None:
            return runner
        watch = Watch(runner.kv_memory(""))
        return TieredRunner(runner, FakeTier(watch.memory, stored, delay=2), watch)

    executor = MortalExecutor(make, kills, max_submitted(config))
    return Engine(config, executor, ByteTokenizer()), executor


def step(engine: Engine, executor: MortalExecutor) -> list[Delta]:
    """Runs a step, or handles a crash."""
    deltas: list[Delta] = []
    try:
        deltas += engine.start_step()
        engine.finish_step()
    except RankDied:
        deltas += engine.suspend()
        engine.check()
        executor.restart()
        deltas += engine.resume(engine.adapters.reload())
    engine.check()
    return deltas


def run_through(
    engine: Engine, executor: MortalExecutor, *requests: Request, max_steps: int = 10_000
) -> dict[str, list[Delta]]:
    """Runs until nothing is left, however often the rank dies; deltas by request."""
    found: dict[str, list[Delta]] = {request.id: [] for request in requests}
    for request in requests:
        engine.add(request)
    for _ in range(max_steps):
        if not engine.has_work:
            return found
        for delta in step(engine, executor):
            found.setdefault(delta.request_id, []).append(delta)
    raise AssertionError(f"still working after {max_steps} steps")


def at_steps(numbers: Container[int], counts: Kills = lambda batch: bool(batch.work)) -> Kills:
    """Kills at the steps of these numbers, counted over all ranks; by default only steps that compute count."""
    num_steps = 0

    def kills(batch: Batch) -> bool:
        nonlocal num_steps
        num_steps += counts(batch)
        return counts(batch) and num_steps in numbers

    return kills


class ShyExecutor(MortalExecutor):
    """Restarts when `may_return` is set; before that each of `refusals` is raised once."""

    def __init__(self, make: Callable[[], Runner]) -> None:
        super().__init__(make)
        self.may_return = threading.Event()
        self.refusals: list[Exception] = []
        self.num_tries = 0
        self.num_kills = 0

    def is_alive(self) -> bool:
        return not self.is_dead

    def restart(self) -> None:
        self.num_tries += 1
        if self.refusals:
            raise self.refusals.pop(0)
        self.may_return.wait()
        if self.num_kills:
            raise ModelError("killed")
        super().restart()

    def kill(self) -> None:
        self.num_kills += 1
        self.may_return.set()


GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
DIGITS = "%llguidance {}\nstart: /[0-9 ]{6,9}/"


def prompt(length: int, first: int = 1) -> tuple[int, ...]:
    return tuple((first + i) % 256 for i in range(length))


def truth(request: Request, num_tokens: int) -> list[int]:
    return fake_answer(request.prompt_ids, request.params, request.params.seed or 0, num_tokens)


REPEATING = (*b"abcabc", *truth(Request("r", tuple(b"abcabc"), GREEDY), 9), *b"abcabc")
DRAWN = replace(GREEDY, temperature=1.0)
NOTHING = SamplingParams(temperature=0, max_tokens=0)
THOUGHTFUL = replace(GREEDY, reasoning_end="zz", max_reasoning_tokens=2, max_tokens=12, ignore_eos=False)


def piece(request: Request, part: slice) -> str:
    """A piece of the request's greedy answer."""
    return bytes(truth(request, 9)[part]).decode()


def stopped(name: str, first: int, part: slice, more: str = "") -> Request:
    request = Request(name, prompt(7, first), GREEDY)
    return replace(request, params=replace(GREEDY, stop=("never", piece(request, part) + more)))


def predicted(name: str) -> Request:
    """Its guesses pay, because they are right."""
    request = Request(name, prompt(8, 120), replace(GREEDY, max_tokens=20))
    return replace(request, prediction=tuple(truth(request, 20)))


MIXED = (
    predicted("predicted"),
    Request("drawn", prompt(6, 140), DRAWN),
    Request("greedy", prompt(9), GREEDY),
    Request("seeded", prompt(6, 40), replace(DRAWN, seed=7)),
    Request("one of two", prompt(10, 80), replace(DRAWN, seed=1)),
    Request("two of two", prompt(10, 80), replace(DRAWN, seed=2)),
    Request("logprobs", prompt(11, 5), replace(GREEDY, logprobs=2, prompt_logprobs=1)),
    Request("scored", prompt(13, 9), replace(NOTHING, prompt_logprobs=0)),
    stopped("stopped", 90, slice(3, 5)),
    stopped("held back", 20, slice(-2, None), "x"),
    Request("mean", prompt(12, 60), NOTHING, pooling="mean"),
    Request("last", prompt(12, 61), NOTHING, pooling="last"),
    Request("grammar", prompt(5, 30), replace(GREEDY, grammar=DIGITS, ignore_eos=False)),
    Request("reasoning", prompt(5, 31), replace(THOUGHTFUL, grammar=DIGITS)),
    Request("thoughts", prompt(5, 32), THOUGHTFUL),
    Request("repeating", REPEATING, GREEDY),
    Request("urgent", prompt(4, 70), GREEDY, priority=1),
    Request("salted", prompt(9), GREEDY, cache_salt="other"),
)
ENGINES = {
    "plain": {"max_batch": 16},
    "few blocks, chunks": {"num_blocks": 17, "max_batch": 16, "max_tokens_per_step": 16},
    "swapping": {"num_blocks": 17, "num_host_blocks": 40, "max_batch": 16, "max_tokens_per_step": 40},
    "guesses, no cache": {
        "max_batch": 16,
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "enable_prefix_cache": False,
    },
    "static, reserved": {"max_batch": 3, "is_continuous": False, "max_preempt": 0},
    "feedback": {"max_batch": 5, "prefill_policy": 3, "decode_policy": 3, "max_preempt": 1},
}


def said(deltas: Sequence[Delta]) -> tuple[object, ...]:
    """Everything that a client learns, independent of how it is split into deltas."""
    logprobs = [value for delta in deltas for value in delta.logprobs]
    scores = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
    last = deltas[-1]
    ends = [delta.finish_reason for delta in deltas if delta.finish_reason is not None]
    return (
        tokens_of(list(deltas)),
        text_of(list(deltas)),
        logprobs,
        scores,
        ends,
        last.stop_reason,
        last.seed,
        last.embedding,
    )


def answers(**fields: object) -> dict[str, tuple[object, ...]]:
    engine, executor = mortal_engine(**fields)
    return {name: said(deltas) for name, deltas in run_through(engine, executor, *MIXED).items()}
