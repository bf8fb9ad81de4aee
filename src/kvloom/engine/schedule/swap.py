"""Where a preempted sequence's keys and values go: to host memory and back, or nowhere, to be computed again. Pure.

Both give the same tokens; `is_swap_cheaper` says which takes less time.
"""

from typing import NamedTuple


class SwapCosts(NamedTuple):
    """Measured costs of both ways. token_s None = no prefill was measured yet."""

    block_s: float = 0.0  # seconds to copy one block, one way
    token_s: float | None = None  # seconds to compute one token of a prefill


def is_swap_cheaper(num_blocks: int, num_tokens: int, costs: SwapCosts) -> bool:
    """Whether copying every block out and back is faster than computing every token again; True if unmeasured."""
    return costs.token_s is None or 2 * num_blocks * costs.block_s < num_tokens * costs.token_s
