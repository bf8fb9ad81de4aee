"""Batches of blocks: pinned ones, their addresses, and those that pass between nodes."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ems.runs import Bytes, address_of
from ems.wire.messages import SUM_BYTES, split_keys
from kvloom.pool.storage.entries import Block


class Located(NamedTuple):
    """Positions of pinned blocks, [blocks] each: segment, offset within it, length in bytes; and checksums, 16 bytes
    each.
    """

    segments: list[int]
    offsets: list[int]
    lengths: list[int]
    sums: bytes


class Held(Protocol):
    """Pinned blocks, in order, until `release`."""

    def __len__(self) -> int: ...

    def located(self) -> Located: ...

    def blocks(self) -> list[Block]:
        """Each block by itself; the caller then ends their pins."""
        ...

    def release(self) -> None:
        """Ends the pins."""
        ...


class Spans:
    """rows [blocks, 2] uint64: address (0 = none) and number of bytes."""

    def __init__(self, rows: npt.NDArray[np.uint64]) -> None:
        """The caller keeps the memory alive."""
        self.rows = rows
        self._kept: Sequence[Bytes | None] = ()

    @classmethod
    def of(cls, memories: Sequence[Bytes | None], lengths: Sequence[int]) -> "Spans":
        """Of arrays, which it keeps alive. None: there is no memory for a block of that length."""
        rows = [
            (0 if memory is None else address_of(memory), length)
            for memory, length in zip(memories, lengths, strict=True)
        ]
        made = cls(np.array(rows, np.uint64).reshape(-1, 2))
        made._kept = memories
        return made

    @property
    def lengths(self) -> list[int]:
        return [int(length) for length in self.rows[:, 1].tolist()]

    def views(self) -> list[Bytes | None]:
        """Each block's memory; None where there is none."""
        rows = self.rows.tolist()
        return [np.ctypeslib.as_array((ctypes.c_uint8 * n).from_address(at)) if at else None for at, n in rows]


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
