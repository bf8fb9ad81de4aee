"""TiledBlocks: maps the engine's KV blocks to runs of the backend's smaller blocks. Lives in a rank process.

Everything that addresses the cache by the engine's numbers (steps, host copies, outer tier, pages) goes through this
module.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvloom.contract.errors import ModelError
from kvloom.rank.kernels.backend import Backend


class TiledBlocks:
    """Blocks 0 .. num_blocks-1 of `block_size` tokens: block b is the backend's b * tiles .. (b + 1) * tiles - 1.

    parts: its bytes as [layers, 2, num_blocks, bytes of a block]; what follows the last whole block is unused.
    """

    def __init__(self, backend: Backend, block_size: int) -> None:
        """`block_size`: tokens. Raises ModelError when it is no multiple of the backend's."""
        self.block_size = block_size
        self._tiles, rest = divmod(self.block_size, backend.block_size)
        if rest:
            raise ModelError(
                f"block_size: the {backend.name} backend has multiples of {backend.block_size}, got {self.block_size}"
            )
        self.num_blocks = backend.num_blocks // self._tiles
        self.block_bytes = backend.kv_bytes // backend.num_blocks * self._tiles
        self._whole = backend.kv_parts
        self.parts = [self._grouped(part) for part in self._whole]

    @property
    def layers(self) -> list[list[Any]]:
        """See contract.messages.Runner. As bytes, so that every element type and layout is moved alike."""
        return [
            [
                part[layer, side].reshape((self.num_blocks, self.block_size, part.shape[-1] // self.block_size))
                for part in self.parts
                for side in range(2)
            ]
            for layer in range(len(self._whole[0]))
        ]

    def table(self, blocks: list[int]) -> list[int]:
        """The backend's block numbers of the engine's `blocks`."""
        if self._tiles == 1:
            return blocks
        return [block * self._tiles + i for block in blocks for i in range(self._tiles)]

    def read(self, block: int) -> Iterator[memoryview]:
        """The bytes that a step reads as this block, found by `table` and not by `layers`. For a cache in host
        memory.
        """
        tiles = self.table([block])
        for part in self._whole:
            for layer in np.asarray(part):
                for side in layer:
                    yield side[tiles[0] : tiles[-1] + 1].reshape(-1).data

    def _grouped(self, part: Any) -> Any:
        used = part[:, :, : self.num_blocks * self._tiles]
        return used.reshape((*part.shape[:2], self.num_blocks, self._tiles * part.shape[3]))
