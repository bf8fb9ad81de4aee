"""Blocks of a NativePool: pinned ones, as arrays or one by one; and batches that pass between nodes."""

import ctypes
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ems.runs import address_of
from ems.wire.messages import SUM_BYTES
from kvloom.pool.storage.entries import Block, Geometry
from kvloom.pool.storage.native import library as c
from kvloom.pool.storage.passing import Announced, Arrived, Located, Spans, Sums

Ids = npt.NDArray[np.uint32]


class Owner(Protocol):
    """The pool, as its blocks see it."""

    handle: int
    functions: c.Functions
    geometry: Geometry

    def unpin_all(self, ids: Ids) -> None:
        """Ends a pin of each."""
        ...

    def settle(self, arrival: c.Arrival, blocks: Announced, statuses: npt.NDArray[np.uint8]) -> bytes:
        """Finish what `arrive` began. Returns the result for each block; statuses: the results in `arrival`."""
        ...


class NativeBlock:
    """A pinned block. State that may change is asked for; `born` distinguishes it from a later block with its
    number.
    """

    __slots__ = ("_born", "_owner", "checksum", "id", "is_rcache", "key", "length", "offset", "slot")

    def __init__(self, owner: Owner, id: int) -> None:
        self._owner = owner
        self.id = id
        now = self._now()
        self._born = now.born
        self.key = bytes(now.key)
        self.checksum = bytes(now.sum)
        self.offset, self.length, self.slot = now.offset, now.length, now.slot
        self.is_rcache = bool(now.is_rcache)

    def _now(self) -> c.Described:
        described = c.Described()
        self._owner.functions.short.pool_describe(self._owner.handle, self.id, described)
        return described

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NativeBlock) and (self.id, self._born) == (other.id, other._born)

    def __hash__(self) -> int:
        return hash((self.id, self._born))

    @property
    def pins(self) -> int:
        return self._now().pins

    @property
    def parent_key(self) -> bytes:
        """The key before it in its chain, or empty."""
        now = self._now()
        return bytes(now.parent) if now.has_parent else b""

    @property
    def is_home(self) -> bool:
        """Whether its home has it too; may also be set after the pin has ended."""
        now = self._now()
        return bool(now.is_home) and now.born == self._born

    @is_home.setter
    def is_home(self, value: bool) -> None:
        owner = self._owner
        owner.functions.short.pool_set_home(owner.handle, self.id, self._born, value)


class HeldBlocks:
    """Pinned blocks as arrays, with capacity for `most`."""

    def __init__(self, owner: Owner, most: int) -> None:
        self._owner = owner
        self.ids: Ids = np.empty(most, np.uint32)
        self.offsets = np.empty(most, np.int64)
        self.lengths = np.empty(most, np.int64)
        self._sums = b""

    def pin(self, keys: bytes) -> None:
        """Pin the prefix of `keys` that is here; there must be capacity for all."""
        sums, most = ctypes.create_string_buffer(SUM_BYTES * len(self.ids)), len(self.ids)
        ids, offsets, lengths = address_of(self.ids), address_of(self.offsets), address_of(self.lengths)
        short = self._owner.functions.short
        count = short.pool_pin_prefix(self._owner.handle, keys, most, ids, offsets, lengths, sums)
        self.ids, self.offsets, self.lengths = self.ids[:count], self.offsets[:count], self.lengths[:count]
        self._sums = sums.raw[: SUM_BYTES * count]

    def keep(self, count: int) -> None:
        """Keep the first `count` blocks of a save."""
        ids = self.ids[:count]
        self.ids = ids[ids != c.NONE]

    def __len__(self) -> int:
        return len(self.ids)

    def located(self) -> Located:
        """Where they lie; of blocks that `pin` found."""
        segments, offsets = np.divmod(self.offsets, self._owner.geometry.segment_bytes)
        return Located(segments.tolist(), offsets.tolist(), self.lengths.tolist(), self._sums)

    def blocks(self) -> list[Block]:
        """Each; who takes them ends their pins."""
        return [NativeBlock(self._owner, id) for id in self.ids.tolist()]

    def release(self) -> None:
        """Ends the pins."""
        self._owner.unpin_all(self.ids)


class NativeOffer:
    """What is here of some keys, pinned."""

    def __init__(self, owner: Owner, keys: list[bytes]) -> None:
        self._owner = owner
        self._ids: Ids = np.empty(len(keys), np.uint32)
        self._sums = np.zeros((len(keys), SUM_BYTES), np.uint8)
        self.spans = Spans(np.zeros((len(keys), 2), np.uint64))
        ids, rows, sums = address_of(self._ids), address_of(self.spans.rows), address_of(self._sums)
        owner.functions.short.pool_pin_each(owner.handle, b"".join(keys), len(keys), ids, rows, sums)

    @property
    def lengths(self) -> list[int]:
        """Of each key."""
        return self.spans.lengths

    @property
    def sums(self) -> bytes:
        """Of each key."""
        return self._sums.tobytes()

    def release(self) -> None:
        """Ends the pins."""
        self._owner.unpin_all(self._ids[self._ids != c.NONE])


class NativeArrival:
    """Memory for blocks that another node announced."""

    def __init__(self, owner: Owner, blocks: Announced, begun: tuple[HeldBlocks, bytearray, Spans]) -> None:
        """begun: what `pool_begin` has filled in, for all of the blocks."""
        self._owner = owner
        self._blocks = blocks
        self._held, self._statuses, self.spans = begun

    def settle(self, sums: Sums) -> Arrived:
        """Publishes those whose sums hold."""
        statuses, held = self._end(address_of(sums)), self._held
        lengths = held.lengths[held.ids != c.NONE].tolist()
        held.keep(len(statuses))
        return Arrived(statuses, held, lengths)

    def give_up(self) -> None:
        """Keeps nothing of them."""
        self._end(None)

    def _end(self, found: int | None) -> bytes:
        """found: where the sums are of what came; None = it did not all come."""
        blocks, held, statuses = self._blocks, self._held, np.array(self._statuses, np.uint8)
        keys = b"".join(blocks.keys)
        arrival = c.Arrival(
            keys,
            address_of(held.lengths),
            blocks.sums,
            blocks.parents or None,
            found,
            address_of(held.offsets),
            address_of(statuses),
            address_of(held.ids),
            len(blocks.keys),
            blocks.is_rcache,
        )
        return self._owner.settle(arrival, blocks, statuses)
