"""KvBlocks: the backend's KV cache, divided into the engine's blocks. Lives in a rank process."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvloom.rank.kernels.backend import Backend


class KvBlocks:
    """Blocks 0 .. num_blocks-1 of `block_size` tokens, each of `block_bytes`; what steps, host copies, outer tier and
    pages address.

    parts: their bytes, see Backend.kv_parts.
    """

    def __init__(self, backend: Backend) -> None:
        self.num_blocks = backend.num_blocks
        self.block_size = backend.block_size
        self.block_bytes = backend.kv_bytes // backend.num_blocks
        self.parts, self._layers = backend.kv_parts, backend.kv_layers
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

    def read(self, block: int) -> Iterator[memoryview]:
        """The bytes that a step reads as this block, not found through `layers`. For a cache in host memory."""
        for part in self.parts:
            yield np.asarray(part)[block].data
