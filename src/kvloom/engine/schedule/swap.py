"""Where a preempted sequence's keys and values go: to host memory and back, or nowhere, to be computed again. Pure.

Both give the same tokens; `is_swap_cheaper` says which takes less time.
"""

from collections.abc import Sequence
from typing import NamedTuple


class SwapCosts(NamedTuple):
    """Measured costs of both ways. token_s None = no prefill was measured yet."""

    block_s: float = 0.0  # seconds to copy one block, one way
    token_s: float | None = None  # seconds to compute one token of a prefill


def is_swap_cheaper(num_blocks: int, num_tokens: int, costs: SwapCosts) -> bool:
    """Whether copying every block out and back is faster than computing every token again; True if unmeasured."""
    return costs.token_s is None or 2 * num_blocks * costs.block_s < num_tokens * costs.token_s


class HostPool:
    """Host blocks 0 .. num_blocks-1; each holds a copy of one sequence's block. Owned by the engine's thread."""

    def __init__(self, num_blocks: int = 0) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))[::-1]

    @property
    def num_free(self) -> int:
        """Number of host blocks without a copy."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks, or None when fewer are free (then nothing changes)."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def release(self, blocks: Sequence[int]) -> None:
        """The copies are no longer needed."""
        self._free += reversed(blocks)

    def check(self, held: Sequence[int]) -> None:
        """Assert that `held`, the host blocks of all sequences, and the free ones are all blocks, each once."""
        assert sorted([*held, *self._free]) == list(range(self.num_blocks)), "host blocks: held and free differ"
