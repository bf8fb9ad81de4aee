"""Figures of a run: times of requests and tokens, and their percentiles. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Times:
    """Times of one request, in seconds of any clock."""

    num_input: int
    started_s: float
    first_token_s: float | None = None  # from start to first token
    ended_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)  # before each token but the first
    last_s: float = 0.0
    num_output: int = 0
    error: str = ""

    def take(self, num_tokens: int, now_s: float) -> None:
        """Record that `num_tokens` tokens arrived together; the gap is divided equally among them."""
        if num_tokens < 1:
            return
        if self.first_token_s is None:
            self.first_token_s = now_s - self.started_s
            num_tokens, self.num_output = num_tokens - 1, 1
            self.gaps_s += [0.0] * num_tokens
        else:
            self.gaps_s += [(now_s - self.last_s) / num_tokens] * num_tokens
        self.num_output += num_tokens
        self.last_s = now_s


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of one or more values."""

    mean: float
    p50: float
    p90: float
    p99: float
    most: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a whole run. Times in ms, None where none was measured; rates per second. lpot: time per output token
    after the first.
    """

    num_requests: int
    num_failed: int
    elapsed_s: float
    average_input_length: float
    average_output_length: float
    first_token_ms: Spread | None
    lpot_ms: Spread | None
    generate_speed: float  # output tokens a second
    total_speed: float  # input and output tokens a second
    requests_per_s: float


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of `values` that at least `percent` % of them do not exceed; `values` are sorted, not empty."""
    return values[max(0, math.ceil(len(values) * percent / 100) - 1)]


def spread(values: Sequence[float]) -> Spread | None:
    """Mean and percentiles of times in any order and unit; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    p50, p90, p99 = (percentile(ordered, percent) for percent in (50, 90, 99))
    return Spread(math.fsum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


def figures(runs: Sequence[Times], elapsed_s: float) -> Figures:
    """Figures of a run that took `elapsed_s`; failed requests only count in num_failed."""
    good = [run for run in runs if not run.error]
    num_input = sum(run.num_input for run in good)
    num_output = sum(run.num_output for run in good)
    count, elapsed_s = max(1, len(good)), max(elapsed_s, 1e-9)
    return Figures(
        num_requests=len(runs),
        num_failed=len(runs) - len(good),
        elapsed_s=elapsed_s,
        average_input_length=num_input / count,
        average_output_length=num_output / count,
        first_token_ms=spread([1000 * run.first_token_s for run in good if run.first_token_s is not None]),
        lpot_ms=spread([1000 * gap for run in good for gap in run.gaps_s]),
        generate_speed=num_output / elapsed_s,
        total_speed=(num_input + num_output) / elapsed_s,
        requests_per_s=len(good) / elapsed_s,
    )


def table(found: Figures) -> list[tuple[str, str]]:
    """Names and values for people."""
    first, lpot = found.first_token_ms, found.lpot_ms
    return [
        ("requests", f"{found.num_requests}" + (f", {found.num_failed} failed" if found.num_failed else "")),
        ("elapsed", f"{found.elapsed_s:.2f} s"),
        ("average_input_length", f"{found.average_input_length:.1f} tokens"),
        ("average_output_length", f"{found.average_output_length:.1f} tokens"),
        ("first token", _line(first)),
        ("lpot", _line(lpot)),
        ("generate speed", f"{found.generate_speed:.1f} tok/s"),
        ("input and output", f"{found.total_speed:.1f} tok/s"),
        ("requests", f"{found.requests_per_s:.2f} a second"),
    ]


def _line(s: Spread | None) -> str:
    if s is None:
        return "none measured"
    return f"{s.mean:.2f} ms mean, {s.p50:.2f} p50, {s.p90:.2f} p90, {s.p99:.2f} p99, {s.most:.2f} longest"
