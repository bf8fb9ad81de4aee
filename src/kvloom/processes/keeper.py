"""Keeper: what to do next about a child that has ended, or is silent. Pure: time is told to it."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0


class Keeper:
    """Of one child and its successors. It runs; or it is started again, with growing pauses between the tries."""

    def __init__(self, silence_s: float = 0.0) -> None:
        """`silence_s`: seconds without a sign of life, of one that was asked for some, after which a child hangs."""
        self._silence_s = silence_s
        self._silent_s: float | None = None  # seconds since it was asked for a sign of life; None = it is not
        self._pause_s = _FIRST_PAUSE_S

    def pause_s(self) -> float:
        """A try to start the child failed: seconds until the next one, 0.1, 0.2, ... 10."""
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return pause_s

    @property
    def is_hung(self) -> bool:
        """Whether the child is to be killed, because it is silent."""
        return self._silent_s is not None and self._silent_s >= self._silence_s

    def passed(self, interval_s: float) -> bool:
        """So much time has passed. Returns whether the child is to be asked for a sign of life.

        Time is counted in calls, so that a pause of this process itself makes no child look silent.
        """
        if self._silent_s is None:
            self._silent_s = 0.0
            return True
        self._silent_s += interval_s
        return False

    def heard(self, is_answer: bool = False) -> None:
        """The child has sent something; is_answer: what it was asked for."""
        if self._silent_s is not None:
            self._silent_s = None if is_answer else 0.0
