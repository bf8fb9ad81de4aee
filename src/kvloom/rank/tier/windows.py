"""Blocks of layers with a window in the outer KV tier: values of the pool beside the blocks of the other layers.

A value is a block, in pieces, because a pool takes none larger than its slabs, under the hash of its tokens and all
before them. What keys do not say is in the name of the pool, as for states.
"""

from collections.abc import Sequence

import numpy as np

from ems.config import CcKvOption
from ems.values.pool import KvPool
from kvloom.contract.windows import WindowBlocks, first_read, longest_prefix
from kvloom.rank.tier.statememory import Bytes
from kvloom.rank.tier.states import PIECE_BYTES, STORED, piece_keys, pieces_of
from kvloom.rank.tier.windowmemory import WindowMemory

VERSION = 1  # of the order of bytes in a block


class WindowStore:
    """A rank's blocks of a window in a pool. May be called from any thread; raises EmsException as the pool does."""

    def __init__(self, pool: KvPool, memory: WindowMemory, block_size: int) -> None:
        self._pool, self._memory, self._block_size = pool, memory, block_size

    def save(self, keys: Sequence[bytes], blocks: Sequence[Bytes], option: CcKvOption) -> int:
        """How many of the first ones are there now."""
        for count, (key, data) in enumerate(zip(keys, blocks, strict=True)):
            pieces = pieces_of(data)
            statuses = self._pool.put(piece_keys(key, len(pieces)), pieces, option, is_chain=True)
            if not all(status in STORED for status in statuses):
                return count
        return len(keys)

    def find(self, asked: WindowBlocks, num_blocks: int, option: CcKvOption) -> range:
        """The last window's blocks of the longest prefix, of at most `num_blocks`, of which these are there; empty if
        it is too short to be of use, or they have no place.
        """
        num_pieces = -(-self._memory.block_bytes // PIECE_BYTES)
        last = self._memory.block_bytes - (num_pieces - 1) * PIECE_BYTES
        keys = [piece_keys(key, num_pieces)[-1] for key in asked.keys]
        is_there = self._pool.exists(keys, [last] * len(keys), option) if keys else []

        def has(index: int) -> bool:
            return asked.first <= index < asked.first + len(is_there) and is_there[index - asked.first]

        end = longest_prefix(num_blocks, self._memory.reach, self._block_size, has)
        window = range(first_read(end * self._block_size, self._memory.reach, self._block_size), end)
        return window if end >= asked.least and len(window) <= len(asked.blocks) else range(0)

    def load(self, keys: Sequence[bytes], option: CcKvOption) -> list[Bytes] | None:
        """All of these blocks, or None."""
        found = [np.empty(self._memory.block_bytes, np.uint8) for _ in keys]
        for key, data in zip(keys, found, strict=True):
            pieces = pieces_of(data)
            if not all(self._pool.get(piece_keys(key, len(pieces)), pieces, option)):
                return None
        return found
