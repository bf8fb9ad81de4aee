"""Held: pinned blocks, as who reads them sees them."""

from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvloom.pool.storage.entries import Block

if TYPE_CHECKING:
    from kvloom.pool.storage.pool import Pool


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


class HeldEntries:
    """Pinned blocks, looked at one by one."""

    def __init__(self, pool: "Pool", entries: list[Block]) -> None:
        self._pool = pool
        self._entries = entries

    def __len__(self) -> int:
        return len(self._entries)

    def located(self) -> Located:
        """Where they lie."""
        places = [self._pool.locate(entry.offset) for entry in self._entries]
        return Located(
            [segment for segment, _offset in places],
            [offset for _segment, offset in places],
            [entry.length for entry in self._entries],
            b"".join(entry.checksum for entry in self._entries),
        )

    def blocks(self) -> list[Block]:
        """Each; who takes them ends their pins."""
        return self._entries

    def release(self) -> None:
        """Ends the pins."""
        self._pool.unpin(self._entries)
