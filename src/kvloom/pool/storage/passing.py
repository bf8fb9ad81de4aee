"""Blocks that pass between nodes, as batches: what one offers, and what arrives at the other."""

from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ems.wire.messages import SUM_BYTES, Status, split_keys, split_sums
from kvloom.pool.storage.entries import Begun, Block, NoRoom, Reservation, Written
from kvloom.pool.storage.held import Held, HeldEntries
from kvloom.pool.storage.spans import Spans

if TYPE_CHECKING:
    from kvloom.pool.storage.pool import Pool

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


class EntryOffer:
    """`Offered` by a pool that keeps its blocks in Python."""

    def __init__(self, pool: "Pool", keys: list[bytes]) -> None:
        self._pool = pool
        self._entries = pool.pin_each(keys)

    @property
    def lengths(self) -> list[int]:
        """Of each key."""
        return [entry.length if entry is not None else 0 for entry in self._entries]

    @property
    def sums(self) -> bytes:
        """Of each key."""
        return b"".join(entry.checksum if entry is not None else bytes(SUM_BYTES) for entry in self._entries)

    @property
    def spans(self) -> Spans:
        """Of each key."""
        views = [self._pool.view(each.offset, each.length) if each is not None else None for each in self._entries]
        return Spans.of(views, self.lengths)

    def release(self) -> None:
        """Ends the pins."""
        self._pool.unpin([entry for entry in self._entries if entry is not None])


class EntryArrival:
    """`Arrival` at a pool that keeps its blocks in Python."""

    def __init__(self, pool: "Pool", blocks: Announced) -> None:
        self._pool = pool
        self._blocks = blocks
        self._begun: list[Begun] = []
        while len(self._begun) < len(blocks.keys):  # one that finds no room does not keep out those behind it
            keys, lengths = blocks.keys[len(self._begun) :], blocks.lengths[len(self._begun) :]
            self._begun += pool.begin_all(keys, lengths, [blocks.is_rcache] * len(keys))

    @property
    def spans(self) -> Spans:
        """Where their bytes belong."""
        view = self._pool.view
        memories = [view(each.offset, each.length) if isinstance(each, Reservation) else None for each in self._begun]
        return Spans.of(memories, self._blocks.lengths)

    def settle(self, sums: Sums) -> Arrived:
        """Publishes those whose sums hold."""
        statuses, entries, unsound = bytearray(), list[Block](), list[Reservation]()
        parents = split_keys(self._blocks.parents) or [b""] * len(self._begun)
        for i, announced in enumerate(split_sums(self._blocks.sums)):
            begun, status = self._begun[i], UNSOUND
            if isinstance(begun, NoRoom):
                status = begun.status
            elif not isinstance(begun, Reservation):
                is_same = begun.checksum == announced and begun.length == self._blocks.lengths[i]
                status = Status.DUPLICATE if is_same else Status.CONFLICT
                entries.append(begun)
            elif sums[i].tobytes() != announced:
                unsound.append(begun)
            else:
                status, entry = self._pool.publish(Written(begun, announced, parents[i]))
                entries.append(entry)
            statuses.append(status)
        for reservation in unsound:
            self._pool.abandon(reservation)
        for entry in entries:
            entry.is_home = entry.is_home or self._blocks.is_rcache
        return Arrived(bytes(statuses), HeldEntries(self._pool, entries), [entry.length for entry in entries])

    def give_up(self) -> None:
        """Keeps nothing of them."""
        for each in self._begun:
            if isinstance(each, Reservation):
                self._pool.abandon(each)
        self._pool.unpin([each for each in self._begun if not isinstance(each, Reservation | NoRoom)])
