"""Places: which of some equal rooms in a rank's memory are free. Pure.

Of host blocks, each of which holds a copy of one sequence's block, and of states, one for each running sequence.
"""

from collections.abc import Sequence


class Places:
    """Places 0 .. count-1; each has one holder or none. Owned by the engine's thread."""

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self._free = list(range(count))[::-1]  # the place released last is taken first: its memory is resident

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` places, or None when fewer are free (then nothing changes)."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def release(self, places: Sequence[int]) -> None:
        """What they hold is no longer needed."""
        self._free += reversed(places)

    def check(self, held: Sequence[int]) -> None:
        """Assert that `held`, the places of all sequences, and the free ones are all places, each once."""
        assert sorted([*held, *self._free]) == list(range(self.count)), "places: held and free differ"
