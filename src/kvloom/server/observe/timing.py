"""Timing: when a generation waited, began and went on."""

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Timing:
    """Seconds: waited for an admission slot, from there to the first token, from there to the last token so far."""

    queue_s: float = 0.0
    first_token_s: float | None = None
    decode_s: float = 0.0
    num_tokens: int = 0
    has_slot: bool = False
    _choices: dict[int, list[float]] = field(default_factory=dict)  # when each one's last token came, and how many
    _began: float = field(default_factory=time.perf_counter)

    @property
    def age_s(self) -> float:
        """Since the request came."""
        return self.queue_s + time.perf_counter() - self._began

    @property
    def now_s(self) -> float:
        """Since the epoch."""
        return time.time()

    def slot_given(self) -> None:
        now = time.perf_counter()
        self.queue_s, self._began, self.has_slot = now - self._began, now, True

    @property
    def inference_s(self) -> float:
        """From the slot to the last token."""
        return (self.first_token_s or 0.0) + self.decode_s

    @property
    def longest(self) -> int:
        """Tokens of the longest choice so far."""
        return int(max((count for _, count in self._choices.values()), default=0))

    def token(self, choice: int) -> float | None:
        """Seconds since this choice's token before; None for its first."""
        passed = time.perf_counter() - self._began
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
