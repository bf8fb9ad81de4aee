"""Timing: when a generation waited, began and went on."""

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Timing:
    """Seconds: waited for a place, from there to the first token, from there to the last token so far."""

    queue_s: float = 0.0
    first_token_s: float | None = None
    decode_s: float = 0.0
    num_tokens: int = 0
    has_place: bool = False
    _began: float = field(default_factory=time.perf_counter)

    @property
    def age_s(self) -> float:
        """Since the request came."""
        return self.queue_s + time.perf_counter() - self._began

    def place_given(self) -> None:
        now = time.perf_counter()
        self.queue_s, self._began, self.has_place = now - self._began, now, True

    def token(self) -> bool:
        """Whether it is the first."""
        passed = time.perf_counter() - self._began
        if self.first_token_s is None:
            self.first_token_s = passed
        self.decode_s = passed - self.first_token_s
        self.num_tokens += 1
        return self.num_tokens == 1
