"""Blocks that pass between nodes, as batches: what one offers, and what arrives at the other."""

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ems.wire.messages import SUM_BYTES, split_keys
from kvloom.pool.storage.held import Held
from kvloom.pool.storage.spans import Spans

UNSOUND = 254  # a status: other bytes came than were announced
Sums = npt.NDArray[np.uint8]  # [blocks, 16]


class Offered(Protocol):
    """What is here of some keys, pinned until `release`. Of each key: lengths, 0 where nothing is; sums; spans."""

    @property
    def lengths(self) -> list[int]: ...

    @property
    def sums(self) -> bytes: ...

    @property
    def spans(self) -> Spans: ...

    def release(self) -> None: ...


class Announced(NamedTuple):
    """Blocks that another node announces, whose bytes follow. sums: 16 bytes each; parents: the key before each in its
    chain, 32 bytes each, or none at all.

    is_rcache: their home is the node that sends them; they stay here as copies.
    """

    keys: list[bytes]
    lengths: list[int]
    sums: bytes
    parents: bytes = b""
    is_rcache: bool = False

    def part(self, start: int, end: int) -> "Announced":
        """Some of them."""
        sums, parents = self.sums[start * SUM_BYTES : end * SUM_BYTES], b"".join(split_keys(self.parents)[start:end])
        return Announced(self.keys[start:end], self.lengths[start:end], sums, parents, self.is_rcache)


class Arrived(NamedTuple):
    """What became of them: a `Status` each, or UNSOUND; and the blocks of their keys that are here, pinned, with the
    bytes of each."""

    statuses: bytes
    held: Held
    lengths: list[int]


class Arrival(Protocol):
    """Memory for announced blocks, one of two to be called when they came, or did not."""

    @property
    def spans(self) -> Spans:
        """Where their bytes belong; nowhere, if a block is here already or finds no room."""
        ...

    def settle(self, sums: Sums) -> Arrived:
        """Publishes those whose bytes' sums are those announced."""
        ...

    def give_up(self) -> None:
        """Keeps nothing of them."""
        ...
