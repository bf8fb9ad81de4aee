"""Timing: how long a generation waited, prefilled and decoded."""

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Timing:
    """Seconds of waiting for an admission slot, from then to the first token, and from then to the last one so far."""

    queue_s: float = 0.0
    first_token_s: float | None = None
    decode_s: float = 0.0
    num_tokens: int = 0
    has_slot: bool = False
    _choices: dict[int, list[float]] = field(default_factory=dict)  # choice -> its last token's time, token count
    _began: float = field(default_factory=time.perf_counter)

    @property
    def age_s(self) -> float:
        """Seconds since the request's arrival."""
        return self.queue_s + time.perf_counter() - self._began

    @property
    def now_s(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def slot_given(self) -> None:
        now = time.perf_counter()
        self.queue_s, self._began, self.has_slot = now - self._began, now, True

    @property
    def inference_s(self) -> float:
        """Seconds from the slot to the last token."""
        return (self.first_token_s or 0.0) + self.decode_s

    @property
    def longest(self) -> int:
        """Tokens of the longest choice so far."""
        return int(max((count for _, count in self._choices.values()), default=0))

    def token(self, choice: int, time_s: float) -> float | None:
        """Record a token that came at `time_s` (time.perf_counter()). Returns the seconds since the choice's previous
        token; None for its first.
        """
        passed = time_s - self._began
        first_s = self.first_token_s
        if first_s is None:
            first_s = self.first_token_s = passed
        self.decode_s = passed - first_s
        self.num_tokens += 1
        known = self._choices.get(choice)
        if known is None:
            self._choices[choice] = [passed, 1]
            return None
        gap_s = passed - known[0]
        known[0] = passed
        known[1] += 1
        return gap_s
