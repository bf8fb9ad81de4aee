"""Batches of blocks that pass between nodes: what one offers, and what arrives at the other."""

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ems.wire.messages import SUM_BYTES, split_keys
from kvloom.pool.storage.held import Held
from kvloom.pool.storage.spans import Spans

UNSOUND = 254  # status: the bytes do not match their checksum
Sums = npt.NDArray[np.uint8]  # [blocks, 16]


class Offered(Protocol):
    """Blocks of some keys that are here, pinned until `release`. For each key: lengths (0 = not here), checksums,
    spans.
    """

    @property
    def lengths(self) -> list[int]: ...

    @property
    def sums(self) -> bytes: ...

    @property
    def spans(self) -> Spans: ...

    def release(self) -> None: ...


class Announced(NamedTuple):
    """Blocks that another node announces; their bytes follow. sums: 16 bytes each; parents: key before each in its
    chain, 32 bytes each, or empty. is_rcache: the sending node is their home; they stay here as copies.
    """

    keys: list[bytes]
    lengths: list[int]
    sums: bytes
    parents: bytes = b""
    is_rcache: bool = False

    def part(self, start: int, end: int) -> "Announced":
        """A range of them."""
        sums, parents = self.sums[start * SUM_BYTES : end * SUM_BYTES], b"".join(split_keys(self.parents)[start:end])
        return Announced(self.keys[start:end], self.lengths[start:end], sums, parents, self.is_rcache)


class Arrived(NamedTuple):
    """Results: a `Status` each, or UNSOUND; and the blocks of their keys that are here, pinned, with the length of
    each.
    """

    statuses: bytes
    held: Held
    lengths: list[int]


class Arrival(Protocol):
    """Memory for announced blocks; call `settle` when their bytes have come, otherwise `give_up`."""

    @property
    def spans(self) -> Spans:
        """Memory for their bytes; none where a block is here already or finds no room."""
        ...

    def settle(self, sums: Sums) -> Arrived:
        """Publish those whose checksums match."""
        ...

    def give_up(self) -> None:
        """Drop all of them."""
        ...
