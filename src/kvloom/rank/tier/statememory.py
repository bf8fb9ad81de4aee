"""StateMemory: the states of a rank's sequences as the outer tier may use them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvloom.rank.kernels.backend import Backend

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class StateMemory:
    """A rank's states as the tier may use them. read: a copy of the state at a place, and of a block (-1: none) behind
    it; write: the reverse. Both are called between steps, by the rank's thread.
    """

    state_bytes: int
    block_bytes: int
    read: Callable[[int, int], Bytes]
    write: Callable[[int, int, Bytes], None]

    def size(self, has_block: bool) -> int:
        return self.state_bytes + (self.block_bytes if has_block else 0)


def state_memory(backend: Backend, block_parts: Sequence[Any], block_bytes: int) -> StateMemory:
    """The backend's states, and blocks behind them; `block_parts` as Backend.kv_parts, in the engine's blocks."""
    size = backend.state_bytes

    def pieces(place: int, block: int, data: Bytes) -> Iterator[tuple[Any, Any]]:
        """Each part of a state or block, and the memory of the same shape in `data`."""
        yield backend.sequence_states[place], data[:size]
        first = size
        for part in block_parts if block >= 0 else ():
            row = part[block]
            yield row, data[first : first + row.nbytes].reshape(tuple(row.shape))
            first += row.nbytes

    def read(place: int, block: int) -> Bytes:
        data = np.empty(memory.size(block >= 0), np.uint8)
        for part, copy in pieces(place, block, data):
            backend.copy(copy, part)
        return data

    def write(place: int, block: int, data: Bytes) -> None:
        for part, copy in pieces(place, block, data):
            backend.copy(part, copy)

    memory = StateMemory(size, block_bytes, read, write)
    return memory
