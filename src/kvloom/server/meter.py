"""Meter: what is counted and timed of the generations of one model, for /metrics and /metrics-json."""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvloom.engine.request import FinishReason
from kvloom.server.timing import Timing

TIME_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
GAP_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


class Histogram:
    """Counts of values by upper bound, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last: above every bound
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def mean(self) -> float:
        return self.sum / max(1, sum(self.counts))

    def cumulative(self) -> list[tuple[str, float]]:
        """(bound, values up to it), as Prometheus tells histograms."""
        total, rows = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            rows.append(("+Inf" if bound == float("inf") else f"{bound:g}", float(total)))
        return rows


class Throughput:
    """What a total gained a second, over RATE_S or the time between two looks, whichever is longer."""

    RATE_S = 10.0

    def __init__(self, now_s: float) -> None:
        self._looks: deque[tuple[float, float]] = deque([(now_s, 0.0)])  # (time, total), one older than RATE_S

    def rate(self, now_s: float, total: float) -> float:
        while len(self._looks) > 1 and now_s - self._looks[1][0] >= self.RATE_S:
            self._looks.popleft()
        since_s, before = self._looks[0]
        if now_s - self._looks[-1][0] >= 1.0:  # a scrape more often than that is no new look
            self._looks.append((now_s, total))
        return max(0.0, total - before) / max(now_s - since_s, 1e-3)


@dataclass(slots=True)
class Meter:
    """Owned by the server's loop. Times in seconds, of whole generations (all their choices together)."""

    num_received: int = 0
    num_failed: int = 0
    num_aborted: int = 0  # the client went away
    num_finished: Counter[FinishReason] = field(default_factory=Counter)
    first_token: Histogram = field(default_factory=lambda: Histogram(TIME_BOUNDS_S))  # with the wait for a place
    between_tokens: Histogram = field(default_factory=lambda: Histogram(GAP_BOUNDS_S))
    queue: Histogram = field(default_factory=lambda: Histogram(TIME_BOUNDS_S))
    prefill: Histogram = field(default_factory=lambda: Histogram(TIME_BOUNDS_S))  # from the place to the first token
    decode: Histogram = field(default_factory=lambda: Histogram(TIME_BOUNDS_S))
    whole: Histogram = field(default_factory=lambda: Histogram(TIME_BOUNDS_S))
    prompt_tokens: Histogram = field(default_factory=lambda: Histogram(TOKEN_BOUNDS))
    output_tokens: Histogram = field(default_factory=lambda: Histogram(TOKEN_BOUNDS))

    def began(self, timing: Timing) -> None:
        """A generation that has its first token, whatever becomes of it."""
        if timing.first_token_s is not None:
            self.first_token.add(timing.queue_s + timing.first_token_s)
            self.prefill.add(timing.first_token_s)

    def finished(self, timing: Timing, num_prompt: int, num_choices: int, reasons: Iterable[FinishReason]) -> None:
        """A generation that ended by itself."""
        self.num_finished.update(reasons)
        self.prompt_tokens.add(num_prompt)
        self.output_tokens.add(timing.num_tokens)
        self.queue.add(timing.queue_s)
        if timing.first_token_s is not None:
            self.decode.add(timing.decode_s)
            self.whole.add(timing.queue_s + timing.first_token_s + timing.decode_s)
        num_gaps = timing.num_tokens / num_choices - 1
        if num_gaps > 0:
            self.between_tokens.add(timing.decode_s / num_gaps)
