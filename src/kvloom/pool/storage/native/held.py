"""Pinned blocks of a NativePool: a batch of them as arrays, and one by one."""

import ctypes
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ems.runs import address_of
from ems.wire.messages import SUM_BYTES
from kvloom.pool.storage.entries import Block, Geometry
from kvloom.pool.storage.native import library as c
from kvloom.pool.storage.pool import Located

Ids = npt.NDArray[np.uint32]


class Owner(Protocol):
    """The pool, as its blocks see it."""

    handle: int
    functions: c.Functions
    geometry: Geometry

    def unpin_all(self, ids: Ids) -> None:
        """Ends a pin of each."""
        ...


class NativeBlock:
    """A pinned block. What may change meanwhile is asked for; `born` tells it from a later block of its number."""

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
        """Whether its home has it too; may be set by who no longer pins it."""
        now = self._now()
        return bool(now.is_home) and now.born == self._born

    @is_home.setter
    def is_home(self, value: bool) -> None:
        owner = self._owner
        owner.functions.short.pool_set_home(owner.handle, self.id, self._born, value)


class HeldBlocks:
    """Pinned blocks as arrays; made with room for `most`, then filled."""

    def __init__(self, owner: Owner, most: int) -> None:
        self._owner = owner
        self.ids: Ids = np.empty(most, np.uint32)
        self.offsets = np.empty(most, np.int64)
        self._lengths = np.empty(most, np.int64)
        self._sums = b""

    def pin(self, keys: bytes) -> None:
        """The prefix of `keys` that is here; there is room for as many."""
        sums, most = ctypes.create_string_buffer(SUM_BYTES * len(self.ids)), len(self.ids)
        ids, offsets, lengths = address_of(self.ids), address_of(self.offsets), address_of(self._lengths)
        short = self._owner.functions.short
        count = short.pool_pin_prefix(self._owner.handle, keys, most, ids, offsets, lengths, sums)
        self.ids, self.offsets, self._lengths = self.ids[:count], self.offsets[:count], self._lengths[:count]
        self._sums = sums.raw[: SUM_BYTES * count]

    def keep(self, count: int) -> None:
        """Of what a save filled in, the blocks among the first `count`."""
        ids = self.ids[:count]
        self.ids = ids[ids != c.NONE]

    def __len__(self) -> int:
        return len(self.ids)

    def located(self) -> Located:
        """Where they lie; of blocks that `pin` found."""
        segments, offsets = np.divmod(self.offsets, self._owner.geometry.segment_bytes)
        return Located(segments.tolist(), offsets.tolist(), self._lengths.tolist(), self._sums)

    def blocks(self) -> list[Block]:
        """Each; who takes them ends their pins."""
        return [NativeBlock(self._owner, id) for id in self.ids.tolist()]

    def release(self) -> None:
        """Ends the pins."""
        self._owner.unpin_all(self.ids)
