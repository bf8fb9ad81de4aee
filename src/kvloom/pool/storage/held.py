"""Held: pinned blocks, as who reads them sees them."""

from typing import NamedTuple, Protocol

from kvloom.pool.storage.entries import Block


class Located(NamedTuple):
    """Where pinned blocks lie, [blocks] each: segment, offset within it, bytes; and their sums, 16 bytes each."""

    segments: list[int]
    offsets: list[int]
    lengths: list[int]
    sums: bytes


class Held(Protocol):
    """Pinned blocks, in order, until `release`."""

    def __len__(self) -> int: ...

    def located(self) -> Located: ...

    def blocks(self) -> list[Block]:
        """Each, for who looks at them one by one; who takes them ends their pins."""
        ...

    def release(self) -> None:
        """Ends the pins."""
        ...
