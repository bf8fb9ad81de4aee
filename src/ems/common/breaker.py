"""Breaker: when a failing peer is left alone, and when it is tried again. Pure."""

from dataclasses import dataclass

_MAX_DOUBLINGS = 16


@dataclass
class Breaker:
    """Keeps calls away from a node, store or pool that fails: it is left alone, each time for longer.

    When the pause is over one call may try; its outcome closes the breaker or doubles the pause. Times in seconds of
    the caller's clock. max_failures: so many in a row open it. patience_s: what a call that is given up must have
    waited to count as a failure; calls with less time add up, so that a caller in a hurry keeps nobody else away.
    """

    max_failures: int = 2
    first_pause_s: float = 0.5
    last_pause_s: float = 30.0
    patience_s: float = 0.2
    waited_s: float = 0.0  # by calls that were given up since the last answer
    failures: int = 0
    open_until_s: float = 0.0

    def allows(self, now_s: float) -> bool:
        """Whether to call now. After a pause it says yes once, and then no until the outcome is reported."""
        if self.failures < self.max_failures:
            return True
        if now_s < self.open_until_s:
            return False
        self.open_until_s = now_s + self.last_pause_s
        return True

    def is_open(self, now_s: float) -> bool:
        """Whether calls are suppressed; changes nothing."""
        return self.pause_s(now_s) > 0

    def pause_s(self, now_s: float) -> float:
        """Seconds until `allows` says yes; 0 = now."""
        return max(0.0, self.open_until_s - now_s) if self.failures >= self.max_failures else 0.0

    def succeed(self) -> None:
        """A call succeeded."""
        self.failures = 0
        self.open_until_s = self.waited_s = 0.0

    def fail(self, now_s: float) -> None:
        """A call failed."""
        self.failures += 1
        if self.failures >= self.max_failures:
            doublings = min(_MAX_DOUBLINGS, self.failures - self.max_failures)
            self.open_until_s = now_s + min(self.last_pause_s, self.first_pause_s * 2**doublings)

    def give_up(self, took_s: float, now_s: float, is_answered: bool = False) -> None:
        """A call got no result in its time, `took_s`. is_answered: the other side had begun to answer."""
        if is_answered and took_s < self.patience_s:
            self.succeed()
            return
        self.waited_s += took_s
        if self.waited_s >= self.patience_s or self.failures >= self.max_failures:
            self.fail(now_s)
