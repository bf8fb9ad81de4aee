"""KvBlocks: the backend's KV cache, divided into the engine's blocks. Lives in a rank process."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from kvloom.contract.messages import Work
from kvloom.rank.kernels.backend import Backend, Ints

_TABLE_STEP = 8  # blocks: a table's width is rounded up, so that some blocks can be added without a new table


class KvBlocks:
    """Blocks 0 .. num_blocks-1 of `block_size` tokens, each of `block_bytes`; what steps, host copies, outer tier and
    pages address.

    parts: their bytes, see Backend.kv_parts.
    """

    def __init__(self, backend: Backend, of_windows: bool = False) -> None:
        """`of_windows`: the blocks of layers with a window, in place of the others."""
        self.num_blocks, self.block_size = backend.num_blocks, backend.block_size
        self.parts, self._layers = backend.kv_parts, backend.kv_layers
        if of_windows:
            self.num_blocks = backend.num_window_blocks
            self.parts, self._layers = backend.window_parts, backend.window_layers
        self.num_bytes = sum(int(part.nbytes) for part in self.parts)
        self.block_bytes = self.num_bytes // max(1, self.num_blocks)
        self._copy = backend.copy

    @property
    def layers(self) -> list[list[Any]]:
        """See contract.messages.Runner. As bytes, so that every element type and layout is moved alike."""
        shape = self.num_blocks, self.block_size
        return [[part.reshape((*shape, part.shape[1] // self.block_size)) for part in layer] for layer in self._layers]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the contents of blocks: (from, to)."""
        for part in self.parts:
            for source, target in pairs:
                self._copy(part[target], part[source])

    def copy_parts(self, works: Iterable[tuple[int, list[int], Work]]) -> None:
        """Copy blocks to those in which work starts. `works`: copied or -1, its new blocks, work."""
        size = self.block_size
        self.copy([(copied, new[work.start // size - work.first_block]) for copied, new, work in works if copied >= 0])

    def read(self, block: int) -> Iterator[memoryview]:
        """The bytes that a step reads as this block, not found through `layers`. For a cache in host memory."""
        for part in self.parts:
            yield np.asarray(part)[block].data


def padded(tables: Sequence[list[int]]) -> Ints:
    """Tables of blocks as rows of one array, with some room behind the longest; -1 = unused."""
    width = -(-max(map(len, tables)) // _TABLE_STEP) * _TABLE_STEP
    return np.array([table + [-1] * (width - len(table)) for table in tables], np.int32)
