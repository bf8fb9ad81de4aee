"""NativeLine: whole calls over a link in C++: a batch's request, its answer, and what lies between, without Python."""

import ctypes
import errno
import os
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ems.keys import KEY_BYTES
from ems.native import functions as c
from ems.native.library import Xxh3, xxh3
from ems.runs import Bytes, Numbers, address_of
from ems.wire import messages as m

_UNEXPECTED, _UNMAPPED, _OUTSIDE = -1, -2, -3  # instead of an error number


class Unexpected(Exception):
    """Another answer than the one expected: `data` begins with its frame."""

    def __init__(self, data: bytes) -> None:
        super().__init__("an unexpected answer")
        self.data = data


class Mapped(NamedTuple):
    """Segments of the pool in this process. memories: keeps them there."""

    table: "ctypes.Array[c.Segment]"
    memories: list[Bytes]
    num_given_back: int  # by the agent, when they were mapped


class WantedLoad(NamedTuple):
    """Blocks to load. sizes [blocks] in bytes."""

    blocks: c.Batch
    keys: bytes
    sizes: Numbers
    is_local: bool


class Loaded(NamedTuple):
    """What a load found: blocks that were verified and written; whether one was damaged; why no more were found."""

    num_done: int
    is_damaged: bool
    cause: int


class WantedSave(NamedTuple):
    """Blocks to save through a staging area. sizes [blocks] in bytes; parent: the key before the first, or empty.

    region_bytes: of the area, for one message; num_regions: messages under way at once; first_bytes: of the first.
    """

    blocks: c.Batch
    keys: bytes
    sizes: Numbers
    parent: bytes
    arena: Bytes
    region_bytes: int
    num_regions: int
    first_bytes: int
    write_rcache: bool


class NativeLine:
    """Calls over one socket, one at a time. Methods raise TimeoutError, OSError or Unexpected."""

    def __init__(self, library: ctypes.CDLL, functions: Xxh3, fd: int) -> None:
        self._library = library
        self._line = c.Line(fd=fd)
        self._xxh3 = ctypes.pointer(functions)

    def _by(self, deadline_s: float) -> "ctypes._Pointer[c.Line]":
        self._line.deadline_ns = int(deadline_s * 1e9)
        return ctypes.pointer(self._line)

    def _check(self, problem: int) -> None:
        if problem == _UNEXPECTED:
            raise Unexpected(ctypes.string_at(self._line.odd, self._line.num_odd))
        if problem == errno.ECONNRESET:
            raise ConnectionResetError("the other side closed the connection")
        if problem:  # ETIMEDOUT becomes a TimeoutError
            raise OSError(problem, os.strerror(problem))

    def exists(self, keys: bytes, is_local: bool, deadline_s: float) -> int:
        """How many of the keys, from the first on, a load would find."""
        count = ctypes.c_int64()
        num = len(keys) // KEY_BYTES
        self._check(self._library.ems_line_exists(self._by(deadline_s), keys, num, is_local, ctypes.byref(count)))
        return count.value

    def load(self, wanted: WantedLoad, maps: Callable[[list[int] | None, int], Mapped], deadline_s: float) -> Loaded:
        """Loads the longest prefix that the pool has. Raises IndexError for a block outside of its segment.

        maps: the mapped segments, with those of these numbers, after so many were given back; None = as they are.
        """
        num = len(wanted.sizes)
        mapped, numbers = maps(None, 0), np.empty((3, num), np.int64)
        first, sums = address_of(numbers), ctypes.create_string_buffer(num * m.SUM_BYTES)
        load = c.Load(
            ctypes.pointer(wanted.blocks),
            wanted.keys,
            address_of(wanted.sizes),
            num,
            wanted.is_local,
            self._xxh3,
            num_given_back=mapped.num_given_back,
            segments=first,
            offsets=first + 8 * num,
            lengths=first + 16 * num,
            sums=ctypes.addressof(sums),
            corrupt=-1,
        )
        problem = _UNMAPPED
        while problem == _UNMAPPED:
            load.mapped, load.num_mapped = ctypes.addressof(mapped.table), len(mapped.table)
            problem = self._library.ems_line_load(self._by(deadline_s), ctypes.byref(load))
            if problem == _UNMAPPED:
                mapped = maps(numbers[0, : load.num_found].tolist(), load.num_given_back)
        if problem == _OUTSIDE:
            raise IndexError("a block outside of its segment")
        self._check(problem)
        return Loaded(load.num_done, load.corrupt >= 0, load.cause)

    def save(self, wanted: WantedSave, statuses: bytearray, deadline_s: float) -> None:
        """Saves the blocks; adds to `statuses` what became of each, also when it raises."""
        sizes, out = np.ascontiguousarray(wanted.sizes, np.int64), np.empty(len(wanted.sizes), np.uint8)
        save = c.Save(
            ctypes.pointer(wanted.blocks),
            wanted.keys,
            address_of(sizes),
            wanted.parent or None,
            address_of(wanted.arena),
            address_of(out),
            len(sizes),
            0,
            wanted.region_bytes,
            wanted.num_regions,
            wanted.first_bytes,
            wanted.write_rcache,
        )
        problem = self._library.ems_line_save(self._by(deadline_s), ctypes.byref(save))
        statuses += out[: save.num_done].tobytes()
        self._check(problem)


def native_line(fd: int) -> NativeLine | None:
    """Of a connected socket; None where the library is not at hand."""
    library, summing = c.functions_at_hand(), xxh3()
    return NativeLine(library, summing, fd) if library is not None and summing is not None else None
