"""States in the outer KV tier: values of the pool beside the blocks, found at any position of a prompt.

A value is the state of all layers, and behind it the block that holds the last token before it, if that is not full:
blocks of the tier are. It lies in pieces, because a pool takes none larger than its slabs, under the hash of the tokens
before it. What keys do not say is in the name of the pool: fingerprint of the weights, arithmetic, sizes.
"""

import logging
from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np

from ems.config import CcKvOption
from ems.values.moving import KvStatus
from ems.values.pool import KvPool
from kvloom.contract.states import KeptState, Search
from kvloom.rank.tier.statememory import Bytes, StateMemory

log = logging.getLogger(__name__)

VERSION = 1  # of the order of numbers in a state
PIECE_BYTES = 4 << 20
_AT_ONCE = 256  # positions that are asked for together
STORED = (KvStatus.STORED, KvStatus.PRESENT, KvStatus.CONFLICT, KvStatus.LOCAL)


class StateStore:
    """The states of a rank in a pool. May be called from any thread; raises EmsException as the pool does."""

    def __init__(self, pool: KvPool, memory: StateMemory, block_size: int) -> None:
        self._pool, self._memory, self._block_size = pool, memory, block_size
        self._has_complained = False

    def save(self, kept: KeptState, data: Bytes, option: CcKvOption) -> bool:
        """Whether it is there now."""
        pieces = pieces_of(data)
        statuses = self._pool.put(piece_keys(kept.key, len(pieces)), pieces, option, is_chain=True)
        if KvStatus.TOO_LARGE in statuses and not self._has_complained:
            self._has_complained = True
            log.warning("states are not saved: the pool takes no values of %d bytes (--slab)", len(pieces[0]))
        return all(status in STORED for status in statuses)

    def find(self, search: Search, num_blocks: int, option: Callable[[], CcKvOption]) -> tuple[int, Bytes] | None:
        """(tokens before it, the state) of the longest prefix that has one, if `num_blocks` blocks of it are known."""
        wanted = search.candidates(num_blocks, self._block_size)
        while asked := list(islice(wanted, _AT_ONCE)):
            keys: list[bytes] = []
            sizes: list[int] = []
            for position, key in asked:
                size = self._memory.size(position % self._block_size > 0)
                num_pieces = -(-size // PIECE_BYTES)
                keys += piece_keys(key, num_pieces)[-1:]
                sizes.append(size - (num_pieces - 1) * PIECE_BYTES)
            found = self._pool.exists(keys, sizes, option())
            for position, key in (one for one, is_there in zip(asked, found, strict=True) if is_there):
                data = np.empty(self._memory.size(position % self._block_size > 0), np.uint8)
                pieces = pieces_of(data)
                if all(self._pool.get(piece_keys(key, len(pieces)), pieces, option())):
                    return position, data
        return None


def pieces_of(data: Bytes) -> list[Bytes]:
    return [data[first : first + PIECE_BYTES] for first in range(0, len(data), PIECE_BYTES)]


def piece_keys(key: bytes, num_pieces: int) -> Sequence[bytes]:
    """The last piece is asked for alone, because a pool drops the end of a chain first."""
    return [key + index.to_bytes(2, "little") for index in range(num_pieces)]
