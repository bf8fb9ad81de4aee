"""WindowMemory: the blocks of a rank's layers with a window as the outer tier may use them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvloom.rank.kernels.backend import Backend
from kvloom.rank.tier.statememory import Bytes


@dataclass(frozen=True, slots=True)
class WindowMemory:
    """read: a copy of a block; write: the reverse. Both are called between steps, by the rank's thread. reach: of
    RankInfo.
    """

    block_bytes: int
    reach: int
    read: Callable[[int], Bytes]
    write: Callable[[int, Bytes], None]


def window_memory(backend: Backend, parts: Sequence[Any], reach: int) -> WindowMemory | None:
    """`parts`: as Backend.window_parts, in the engine's blocks. None = there are none."""
    if not parts:
        return None
    block_bytes = sum(part[0].nbytes for part in parts)

    def read(block: int) -> Bytes:
        data = np.empty(block_bytes, np.uint8)
        for row, copy in _rows(parts, block, data):
            backend.copy(copy, row)
        return data

    def write(block: int, data: Bytes) -> None:
        for row, copy in _rows(parts, block, data):
            backend.copy(row, copy)

    return WindowMemory(block_bytes, reach, read, write)


def _rows(parts: Sequence[Any], block: int, data: Bytes) -> list[tuple[Any, Bytes]]:
    """Each part of a block, and the memory of the same shape in `data`."""
    found, first = [], 0
    for part in parts:
        row = part[block]
        found.append((row, data[first : first + row.nbytes].reshape(tuple(row.shape))))
        first += row.nbytes
    return found
