"""The decisions of the tuning guide (spec 2.3.2): which maxBatchSize to try, which to choose, and the rest. Pure."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvloom.contract.capacity import GIB, SHARE, blocks_per_seq, max_batch
from kvloom.engine.schedule.cost import Load
from kvloom.tuning.steptime import StepTimes

CLOSE = 0.05  # the sweep ends when the bounds of maxBatchSize differ by less, relatively
KNEE = 0.95  # share of the best throughput: without a limit, the smallest batch that reaches it is chosen
MIN_PREFILL_TOKENS = 4096  # the guide allows no fewer
MAX_PREEMPT = 10
MAX_BATCH = 5000
_PREFILL_TOKENS = (256, 512, 1024, 2048, 4096, 8192)


class Point(msgspec.Struct, frozen=True):
    """One run of the sweep (a row of spec table 2-10)."""

    max_batch: int
    lpot_ms: float  # mean time per output token after the first
    generate_speed: float  # output tokens a second
    first_token_ms: float
    num_requests: int


@dataclass(frozen=True, slots=True)
class Workload:
    """The workload to tune for, in tokens."""

    average_input: float
    average_output: float
    max_output: int  # maxIterTimes


@dataclass(frozen=True, slots=True)
class Proposal:
    """One key of config.json."""

    key: str
    value: Any
    reason: str


def largest_batch(times: StepTimes, workload: Workload) -> tuple[int, int]:
    """maxBatchSize by the guide's formulas, and Block Num; more sequences than this do not fit into the blocks."""
    num_per_seq = blocks_per_seq(math.ceil(workload.average_input), workload.max_output, times.block_size)
    return max(1, min(MAX_BATCH, max_batch(times.num_blocks, num_per_seq))), num_per_seq


def next_batch(points: Sequence[Point], most: int, limit_ms: float | None) -> int | None:
    """The maxBatchSize to measure next; None when the sweep is done.

    Doubles up to `most` while the limit is kept. Then bisects between the largest size that keeps it and the smallest
    that does not; without a limit, around the best throughput. Takes O(log most) runs.
    """
    tried = sorted(point.max_batch for point in points)
    kept = [p.max_batch for p in points if limit_ms is None or p.lpot_ms <= limit_ms]
    broken = [p.max_batch for p in points if limit_ms is not None and p.lpot_ms > limit_ms]
    if not broken and (not tried or tried[-1] < most):
        return min(most, 2 * tried[-1]) if tried else 1
    if limit_ms is None:
        return _beside_best(points, tried)
    low, high = max((n for n in kept if not broken or n < min(broken)), default=0), min(broken, default=0)
    middle = (low + high) // 2
    is_close = high - low <= max(1, CLOSE * high) or not broken
    return None if is_close or middle < 1 else middle


def _beside_best(points: Sequence[Point], tried: list[int]) -> int | None:
    """The middle of the wider gap beside the best point, while it is wider than a quarter of that point."""
    best = max(points, key=lambda point: point.generate_speed).max_batch
    index = tried.index(best)
    gaps = [(b - a, (a + b) // 2) for a, b in itertools.pairwise(tried) if best in (a, b)]
    width, middle = max(gaps, default=(0, 0))
    return middle if width > max(1, tried[index] // 4) else None


def choose(points: Sequence[Point], limit_ms: float | None) -> Point:
    """The point of highest throughput within the limit; if none is, that of lowest lpot; without a limit the knee."""
    if limit_ms is not None:
        kept = [point for point in points if point.lpot_ms <= limit_ms]
        if not kept:
            return min(points, key=lambda point: (point.lpot_ms, point.max_batch))
        return max(kept, key=lambda point: point.generate_speed)
    best = max(point.generate_speed for point in points)
    return min((p for p in points if p.generate_speed >= KNEE * best), key=lambda point: point.max_batch)


def propose(times: StepTimes, workload: Workload, batch: int, reason: str, lpot_ms: float) -> list[Proposal]:
    """Values of all keys that the guide tunes, for the chosen maxBatchSize."""
    most, num_per_seq = largest_batch(times, workload)
    prefill = prefill_tokens(times)
    tokens = max(MIN_PREFILL_TOKENS, prefill)
    prefill_batch = max(1, min(batch, int(tokens / workload.average_input)))
    input_tokens = math.ceil(workload.average_input)
    prefill_ms = 1000 * times.step_s(Load(input_tokens, 1, input_tokens * (input_tokens + 1) // 2))
    blocks = math.ceil(workload.average_output / times.block_size)
    limit = math.ceil(workload.max_output / times.block_size)
    size_gb = math.ceil(times.kv_bytes / GIB * 1000) / 1000 if times.kv_bytes else -1
    size_reason = f"measured: {SHARE:g} of what is free beside the weights, as far as it is of use"
    return [
        Proposal("npuMemSize", size_gb, size_reason if times.kv_bytes else "automatic"),
        Proposal("maxSeqLen", times.max_seq_len, "the model's own, or what was configured"),
        Proposal("cacheBlockSize", times.block_size, "the kernels' own"),
        Proposal("maxIterTimes", workload.max_output, "the longest answer"),
        Proposal("maxBatchSize", batch, f"{reason}; {times.num_blocks} blocks / {num_per_seq} a request allow {most}"),
        Proposal("maxPrefillTokens", tokens, f"prefill is at its best from {prefill} tokens on; no fewer than 4096"),
        Proposal(
            "maxPrefillBatchSize", prefill_batch, f"maxPrefillTokens / {workload.average_input:.0f} tokens a prompt"
        ),
        Proposal("maxPreemptCount", min(MAX_PREEMPT, batch), "the guide's value, at most maxBatchSize"),
        Proposal("supportSelectBatch", True, "the guide's value"),
        Proposal("prefillTimeMsPerReq", _ms(prefill_ms), "measured: a prefill of the average prompt"),
        Proposal("decodeTimeMsPerReq", _ms(lpot_ms / batch), "measured: a decode step / maxBatchSize"),
        Proposal("preAllocBlocks", min(blocks, limit), f"an average answer of {workload.average_output:.0f} tokens"),
        Proposal("worldSize", 1, "one device"),
        Proposal("npuDeviceIds", [[0]], "as many as worldSize"),
    ]


def prefill_tokens(times: StepTimes) -> int:
    """The smallest number of tokens in a step with nearly the best rate."""
    rates = {n: n / times.step_s(Load(n, 1, 0)) for n in _PREFILL_TOKENS}
    return min(n for n, rate in rates.items() if rate >= KNEE * max(rates.values()))


def _ms(value: float) -> int:
    """In the configuration's form: whole milliseconds, 1 to 1000."""
    return max(1, min(1000, round(value)))
