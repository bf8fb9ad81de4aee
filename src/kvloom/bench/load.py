"""Closed-loop load on a server: a constant number of requests in flight, until all are answered."""

import asyncio
import random
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from kvloom.bench.client import Answer, BenchError, Target, complete

TOKEN_IDS = (1000, 40000)  # prompts are drawn from these; low ids are often special
Progress = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Load:
    """All prompts of the load begin with the same `shared_len` tokens; the `input_len` others differ, so that no cache
    has them.
    """

    concurrency: int
    num_prompts: int
    input_len: int = 128
    output_len: int = 128
    shared_len: int = 0
    token_ids: tuple[int, int] = TOKEN_IDS  # [low, high)

    def __post_init__(self) -> None:
        for name in ("concurrency", "num_prompts", "input_len", "output_len"):
            if getattr(self, name) < 1:
                raise BenchError(f"{name}: {getattr(self, name)} is below 1")
        low, high = self.token_ids
        if not 0 <= low < high:
            raise BenchError(f"token_ids: {low},{high} is no range LOW,HIGH with 0 <= LOW < HIGH")

    def prompts(self, seed: str) -> list[list[int]]:
        """The load's prompts, a function of the seed."""
        low, high = self.token_ids
        shared = draw(f"{seed}-shared", self.shared_len, low, high)
        return [shared + draw(f"{seed}-{i}", self.input_len, low, high) for i in range(self.num_prompts)]


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Milliseconds; None = nothing was measured."""

    p50: float | None
    p90: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class Point:
    """Results of one load. Rates are over the wall time of the whole load; tok_s: tokens of the answers."""

    concurrency: int
    num_prompts: int
    input_len: int
    output_len: int
    tok_s: float
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    gap_ms: Percentiles  # between two pieces of one answer
    num_short: int  # answers of fewer tokens than asked for
    requests_s: float = 0.0  # answers a second
    total_tok_s: float = 0.0  # tokens of prompts and answers a second
    e2el_ms: Percentiles = Percentiles(None, None, None)  # from a request to the end of its answer


async def run(target: Target, load: Load, seed: str, progress: Progress | None = None) -> tuple[list[Answer], float]:
    """The answers in the order of the prompts, and the wall time in seconds. Raises BenchError at the first failure."""
    prompts = list(enumerate(load.prompts(seed)))[::-1]
    answers: dict[int, Answer] = {}

    async def worker() -> None:
        while prompts:
            i, prompt = prompts.pop()
            answers[i] = await complete(target, prompt, load.output_len)
            if progress:
                progress()

    started = time.perf_counter()
    tasks = [asyncio.create_task(worker()) for _ in range(min(load.concurrency, load.num_prompts))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [answers[i] for i in range(load.num_prompts)], time.perf_counter() - started


def warm_up(load: Load) -> Load:
    """A short load of the same shape, so that the first point does not include costs of first use."""
    return replace(load, num_prompts=load.concurrency, output_len=min(8, load.output_len))


def new_seed() -> str:
    """A seed whose prompts no earlier run had, so that no prefix cache has them."""
    return secrets.token_hex(4)


def summarise(load: Load, answers: Sequence[Answer], wall_s: float) -> Point:
    """Rates and percentiles of one load's answers, which took `wall_s` together."""
    return Point(
        concurrency=load.concurrency,
        num_prompts=load.num_prompts,
        input_len=load.shared_len + load.input_len,
        output_len=load.output_len,
        tok_s=round(sum(answer.num_tokens for answer in answers) / wall_s, 1),
        ttft_ms=percentiles([answer.ttft_s for answer in answers]),
        tpot_ms=percentiles([answer.tpot_s for answer in answers if len(answer.gaps_s) > 0]),
        gap_ms=percentiles([gap for answer in answers for gap in answer.gaps_s]),
        num_short=sum(answer.num_tokens < load.output_len for answer in answers),
        requests_s=round(len(answers) / wall_s, 2),
        total_tok_s=round(sum(load.shared_len + load.input_len + each.num_tokens for each in answers) / wall_s, 1),
        e2el_ms=percentiles([answer.times_s[-1] - answer.started_s for answer in answers]),
    )


def percentiles(values_s: Sequence[float]) -> Percentiles:
    """Percentiles by linear interpolation; all None without values."""
    if len(values_s) < 2:
        value = round(1e3 * values_s[0], 2) if values_s else None
        return Percentiles(value, value, value)
    cuts = statistics.quantiles(values_s, n=100, method="inclusive")
    return Percentiles(*(round(1e3 * cuts[q - 1], 2) for q in (50, 90, 99)))


def as_row(point: Point) -> dict[str, object]:
    """The point as one JSON line's content."""
    return {"level": "server", **asdict(point)}


def draw(seed: str, num: int, low: int, high: int) -> list[int]:
    """`num` token ids of [low, high), a function of the seed."""
    source = random.Random(seed)
    return [source.randrange(low, high) for _ in range(num)]
