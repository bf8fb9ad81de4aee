"""Meter: counts and times the generations of one model, for /metrics and /metrics-json."""

import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvloom.contract.request import FinishReason
from kvloom.engine.histogram import Histogram
from kvloom.server.observe.timing import Timing

TIME_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
GAP_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
COUNT_BOUNDS = (1, 2, 5, 10, 20)
TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


class Throughput:
    """Growth of a total in units a second, over RATE_S or the time between two reads, whichever is longer."""

    RATE_S = 10.0

    def __init__(self, now_s: float) -> None:
        self._looks: deque[tuple[float, float]] = deque([(now_s, 0.0)])  # (time, total), at most one older than RATE_S

    def rate(self, now_s: float, total: float) -> float:
        while len(self._looks) > 1 and now_s - self._looks[1][0] >= self.RATE_S:
            self._looks.popleft()
        since_s, before = self._looks[0]
        if now_s - self._looks[-1][0] >= 1.0:  # more frequent reads add no point
            self._looks.append((now_s, total))
        return max(0.0, total - before) / max(now_s - since_s, 1e-3)


@dataclass(frozen=True, slots=True)
class Asked:
    """Size of a generation. `num_prompt`: tokens of all its prompts, `num_choices`: answers to all of them."""

    num_prompt: int
    num_choices: int
    n: int = 1
    max_tokens: int | None = None


def _times() -> Histogram:
    return Histogram(TIME_BOUNDS_S)


def _tokens() -> Histogram:
    return Histogram(TOKEN_BOUNDS)


@dataclass(slots=True)
class Meter:
    """Owned by the server's loop. Times in seconds, of whole generations (all their choices together)."""

    num_received: int = 0
    num_failed: int = 0
    num_aborted: int = 0  # the client disconnected
    num_answers: int = 0  # choices of generations that ended by themselves
    served_s: float = 0.0  # from the request to its end, of generations that ended by themselves
    failed_s: float = 0.0
    last_s: float = 0.0  # arrival of the last generation, since the epoch; 0 = none yet
    num_finished: Counter[FinishReason] = field(default_factory=Counter)
    first_token: Histogram = field(default_factory=_times)  # wait for a slot included
    between_tokens: Histogram = field(default_factory=lambda: Histogram(GAP_BOUNDS_S))  # mean of a generation
    gaps: Histogram = field(default_factory=lambda: Histogram(GAP_BOUNDS_S))  # each, within a choice
    queue: Histogram = field(default_factory=_times)
    prefill: Histogram = field(default_factory=_times)  # from the slot to the first token
    decode: Histogram = field(default_factory=_times)
    inference: Histogram = field(default_factory=_times)  # prefill and decode
    whole: Histogram = field(default_factory=_times)
    prompt_tokens: Histogram = field(default_factory=_tokens)
    computed_tokens: Histogram = field(default_factory=_tokens)  # tokens of the prompts, without cached ones
    output_tokens: Histogram = field(default_factory=_tokens)
    longest_tokens: Histogram = field(default_factory=_tokens)  # tokens of the longest choice
    max_tokens: Histogram = field(default_factory=_tokens)  # max_tokens of the request
    n: Histogram = field(default_factory=lambda: Histogram(COUNT_BOUNDS))

    def received(self) -> None:
        self.num_received += 1
        self.last_s = time.time()

    def token(self, timing: Timing, choice: int, time_s: float) -> None:
        """Record a token of a choice that came at `time_s` (time.perf_counter()), however the generation ends."""
        gap_s = timing.token(choice, time_s)
        if gap_s is not None:
            self.gaps.add(gap_s)
        elif timing.num_tokens == 1 and timing.first_token_s is not None:
            self.first_token.add(timing.queue_s + timing.first_token_s)
            self.prefill.add(timing.first_token_s)

    def failed(self, timing: Timing) -> None:
        self.num_failed += 1
        self.failed_s += timing.age_s

    def finished(self, timing: Timing, asked: Asked, reasons: Iterable[FinishReason], num_computed: int) -> None:
        """Record a generation that ended by itself. `num_computed`: uncached prompt tokens of all choices."""
        self.num_finished.update(reasons)
        self.num_answers += asked.num_choices
        self.served_s += timing.age_s
        self.n.add(asked.n)
        if asked.max_tokens:
            self.max_tokens.add(asked.max_tokens)
        self.prompt_tokens.add(asked.num_prompt)
        self.computed_tokens.add(num_computed)
        self.output_tokens.add(timing.num_tokens)
        self.longest_tokens.add(timing.longest)
        self.queue.add(timing.queue_s)
        if timing.first_token_s is not None:
            self.decode.add(timing.decode_s)
            self.inference.add(timing.inference_s)
            self.whole.add(timing.queue_s + timing.inference_s)
        num_gaps = timing.num_tokens / asked.num_choices - 1
        if num_gaps > 0:
            self.between_tokens.add(timing.decode_s / num_gaps)
