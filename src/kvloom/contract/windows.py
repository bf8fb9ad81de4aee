"""Blocks of layers with a window on their way to and from the outer KV tier: which are needed. Pure."""

from collections.abc import Callable

import msgspec


def first_read(position: int, reach: int, block_size: int) -> int:
    """The first block that a step reads which begins at `position`; `reach`: of RankInfo."""
    return max(0, position + 1 - reach) // block_size


def longest_prefix(count: int, reach: int, block_size: int, has: Callable[[int], bool]) -> int:
    """Blocks of the longest prefix, of at most `count`, of which the last window is there; `has`: whether a block of
    that index is. Asks for each once.
    """
    index = count
    while index > first_read(count * block_size, reach, block_size):
        index -= 1
        if not has(index):
            count = index
    return count


def most_in_window(reach: int, block_size: int) -> int:
    """The most blocks before a prefix's end that a step behind it reads."""
    return -(-(reach - 1) // block_size)


class WindowBlocks(msgspec.Struct, array_like=True):
    """Blocks of layers with a window, and keys as those of Transfer, in chain order. Of a save: one for each block.

    Of a load: `keys` are of the prompt's blocks from `first` on, to its end. The last window of the longest prefix of
    which the tier has what the engine lacks goes to the first of `blocks`, if that prefix has `least` blocks at least.
    `num_known`: blocks of all tokens at its beginning that the engine has; those that are to be loaded follow.
    """

    blocks: list[int]
    keys: list[bytes]
    first: int = 0
    num_known: int = 0
    least: int = 0
