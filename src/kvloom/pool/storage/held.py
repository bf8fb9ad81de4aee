"""Held: a batch of pinned blocks."""

from typing import NamedTuple, Protocol

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
