"""NativeLine: whole calls over a link in C++: a batch's requests, answers and copies without Python."""

import ctypes
import errno
import os
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from ems.keys import KEY_BYTES
from ems.native import functions as c
from ems.native.library import Xxh3, xxh3
from ems.runs import Bytes, address_of

REGION_BYTES = 512 << 10  # bytes of a message's blocks; all messages under way stay in a processor's cache
REGIONS = 4  # messages under way at once
FIRST_BYTES = 128 << 10  # bytes of a save's first message, so that the agent begins soon; later ones grow
_UNEXPECTED, _UNMAPPED, _OUTSIDE = -1, -2, -3  # not an error number


class Unexpected(Exception):
    """An answer that was not expected: `data` begins with its frame."""

    def __init__(self, data: bytes) -> None:
        super().__init__("an unexpected answer")
        self.data = data


class Mapped(NamedTuple):
    """Mapped segments of the pool. memories: keeps them mapped."""

    table: "ctypes.Array[c.Segment]"
    memories: list[Bytes]
    num_given_back: int  # given back by the agent when these were mapped


Maps: TypeAlias = Callable[[list[int] | None, int], Mapped]
"""The mapped segments, with those of these numbers, after so many were given back; None = as they are."""


class WantedLoad(NamedTuple):
    """Blocks to load: those of a plan from `start` to `stop`.

    found: [stop - start], set to whether each was there; None = load their prefix.
    """

    plan: c.Plan
    start: int
    stop: int
    is_local: bool
    found: Bytes | None = None


class Loaded(NamedTuple):
    """Result of a load: blocks verified and written; whether one was damaged; why there were no more."""

    num_done: int
    is_damaged: bool
    cause: int


class WantedSave(NamedTuple):
    """Blocks to save: the first of a plan. parent: the key before them, or empty. statuses: [num_blocks], set to the
    results. arena: the staging area; None = the blocks, which are a chain then, are written to the pool's memory.

    Of the area only: region_bytes for one message; num_regions: messages under way at once; first_bytes: of the first;
    write_rcache.
    """

    plan: c.Plan
    num_blocks: int
    parent: bytes
    arena: Bytes | None = None
    region_bytes: int = 0
    num_regions: int = 0
    first_bytes: int = 0
    write_rcache: bool = True
    is_chain: bool = True  # each block follows the one before it
    statuses: Bytes | None = None

    def call(self) -> c.Save:
        """The same for C++, which writes the results there."""
        plan, num, parent, arena, *others, statuses = self
        area = address_of(arena) if arena is not None else None
        save = c.Save(ctypes.addressof(plan), num, parent or None, area, *others, problem=-1)
        save.statuses = address_of(statuses) if statuses is not None else None
        save.kept = self
        return save


class NativeLine:
    """Calls over one socket, one at a time. Methods raise TimeoutError, OSError or Unexpected."""

    def __init__(self, library: ctypes.CDLL, functions: Xxh3, fd: int, board: Bytes | None) -> None:
        self.library = library
        self._board = board
        self._xxh3 = ctypes.pointer(functions)
        self.address: int = library.ems_line_open(fd)
        self._line = c.Line.from_address(self.address)
        self._line.board = address_of(board) if board is not None else None

    def __del__(self) -> None:
        self.library.ems_line_close(self._line)

    @property
    def xxh3_address(self) -> int:
        """Address of the struct with xxhash's functions."""
        return ctypes.addressof(self._xxh3.contents)

    def _by(self, deadline_s: float) -> c.Line:
        self._line.deadline_ns = int(deadline_s * 1e9)
        return self._line

    def check(self, problem: int) -> None:
        """Raise the error that this result of a call means; 0 = none."""
        if problem == _UNEXPECTED:
            raise Unexpected(ctypes.string_at(self._line.odd, self._line.num_odd))
        if problem == errno.ECONNRESET:
            raise ConnectionResetError("the other side closed the connection")
        if problem:  # ETIMEDOUT becomes a TimeoutError
            raise OSError(problem, os.strerror(problem))

    def exists(self, keys: bytes, is_local: bool, deadline_s: float) -> int:
        """Length of the prefix of the keys that a load would find."""
        count = ctypes.c_int64()
        num = len(keys) // KEY_BYTES
        self.check(self.library.ems_line_exists(self._by(deadline_s), keys, num, is_local, ctypes.byref(count)))
        return count.value

    def load(self, wanted: WantedLoad, maps: Maps, deadline_s: float) -> Loaded:
        """Loads the longest prefix that the pool has. Raises IndexError for a block outside of its segment."""
        plan, start, stop, is_local, found = wanted
        mapped = maps(None, 0)
        load = c.Load(
            ctypes.addressof(plan),
            start,
            stop - start,
            is_local,
            address_of(found) if found is not None else None,
            self._xxh3,
            num_given_back=mapped.num_given_back,
            corrupt=-1,
        )
        load.mapped, load.num_mapped = ctypes.addressof(mapped.table), len(mapped.table)
        return self.finish(load, self.library.ems_line_load(self._by(deadline_s), load), maps)

    def finish(self, load: c.Load, problem: int, maps: Maps) -> Loaded:
        """Continue a load that was begun. Raises as `load` does."""
        self._continue(load, problem, maps, self.library.ems_line_load)
        return Loaded(load.num_done, load.corrupt >= 0, load.cause)

    def save(self, save: c.Save, maps: Maps, deadline_s: float) -> None:
        """Save the blocks; results are written into `save`, also when it raises. Raises as `load` does."""
        save.xxh3 = self.xxh3_address
        mapped = maps(None, 0)
        save.num_given_back = mapped.num_given_back
        save.mapped, save.num_mapped = ctypes.addressof(mapped.table), len(mapped.table)
        self.finish_save(save, self.library.ems_line_save(self._by(deadline_s), save), maps)

    def finish_save(self, save: c.Save, problem: int, maps: Maps) -> None:
        """Continue a save that was begun. Raises as `load` does."""
        self._continue(save, problem, maps, self.library.ems_line_save)

    def _continue(
        self, begun: c.Load | c.Save, problem: int, maps: Maps, call: Callable[[c.Line, c.Load | c.Save], int]
    ) -> None:
        """Map what it needs and call again, until it has ended."""
        while problem == _UNMAPPED:
            numbers = (ctypes.c_int64 * begun.num_found).from_address(begun.segments or 0)
            mapped = maps(list(numbers), begun.num_given_back)
            begun.mapped, begun.num_mapped = ctypes.addressof(mapped.table), len(mapped.table)
            problem = call(self._line, begun)
        if problem == _OUTSIDE:
            raise IndexError("a block outside of its segment")
        self.check(problem)


def native_line(fd: int, board: Bytes | None = None) -> NativeLine | None:
    """For a connected socket, and the session's board if it has one; None where the library is not available."""
    library, summing = c.functions_at_hand(), xxh3()
    return NativeLine(library, summing, fd, board) if library is not None and summing is not None else None
