"""NativeCalls: plain calls over a link in one step each, from the caller's lists to the result.

Everything that a call needs stays with the link. Calls that are not plain, or wrong, are left to Python: `NOT_PLAIN`.
"""

import ctypes
from ctypes import POINTER, PYFUNCTYPE, c_int, c_int64, c_void_p, py_object
from typing import NamedTuple, TypeAlias

from ems.native import functions as c
from ems.native.line import Mapped, NativeLine
from ems.native.plan import Planner
from ems.runs import Bytes, address_of

Given: TypeAlias = tuple[object, object, object] | c.Plan
"""A caller's slots, hashes and tokens of each block; or what was planned of them."""
NOT_PLAIN, PARTLY = -4, -5  # not an error number: nothing was done; or something is left to do or to report


class How(ctypes.Structure):
    """Parameters of a call. deadline_ns: of time.monotonic_ns()."""

    deadline_ns: int
    _fields_ = [("deadline_ns", c_int64), ("is_local", c_int64), ("write_rcache", c_int64)]


class Calls(ctypes.Structure):
    """What calls over one link share, and the result of the last one (call.cpp)."""

    arena: int
    arena_bytes: int
    arena_asked: int
    mapped: int
    num_mapped: int
    num_given_back: int
    total: int
    count: int
    done_bytes: int
    load: c.Load
    save: c.Save
    _fields_ = [
        ("python", c_void_p),
        ("cache", c_void_p),
        ("xxh3", c_void_p),
        ("line", c_void_p),
        ("max_block_bytes", c_int64),
        ("region_bytes", c_int64),
        ("num_regions", c_int64),
        ("first_bytes", c_int64),
        ("is_direct", c_int64),
        ("arena", c_void_p),
        ("arena_bytes", c_int64),
        ("arena_asked", c_int64),
        ("mapped", c_void_p),
        ("num_mapped", c_int64),
        ("num_given_back", c_int64),
        ("total", c_int64),
        ("count", c_int64),
        ("done_bytes", c_int64),
        ("load", c.Load),
        ("save", c.Save),
    ]


class Sizes(NamedTuple):
    """Bytes of the pool's largest block, of a message's blocks, of the first message's; messages under way at once.
    is_direct: blocks are saved without a staging area.
    """

    max_block_bytes: int
    region_bytes: int
    num_regions: int
    first_bytes: int
    is_direct: bool


class NativeCalls:
    """Calls of a link by one planner, one at a time. They return 0, NOT_PLAIN, or what `NativeLine` turns into
    errors.
    """

    def __init__(self, line: NativeLine, planner: Planner, sizes: Sizes) -> None:
        library = line.library
        self.planner = planner
        kept = Calls(planner.python_address, planner.address, line.xxh3_address, line.address, *sizes)
        self._kept = kept, planner, line
        self._close = library.ems_calls_close
        self._load_plan, self._save_plan = library.ems_call_load_plan, library.ems_call_save_plan
        self._address: int = library.ems_calls_open(ctypes.byref(kept))
        self.last = Calls.from_address(self._address)
        whole = PYFUNCTYPE(c_int, c_void_p, py_object, py_object, py_object, POINTER(How))
        self._load, self._save = whole(("ems_call_load", library)), whole(("ems_call_save", library))
        self._exists = PYFUNCTYPE(c_int, c_void_p, py_object, POINTER(How))(("ems_call_exists", library))
        self._arena: Bytes | None = None
        self._is_direct = sizes.is_direct

    def __del__(self) -> None:
        self._close(self._address)

    def load(self, what: Given, how: How, mapped: Mapped) -> int:
        """mapped: not stored, because idle processes unmap it."""
        self._use(mapped)
        if isinstance(what, c.Plan):
            return int(self._load_plan(self._address, what, ctypes.addressof(how)))
        return int(self._load(self._address, *what, how))

    def _use(self, mapped: Mapped) -> None:
        last = self.last
        last.mapped, last.num_mapped = ctypes.addressof(mapped.table), len(mapped.table)
        last.num_given_back = mapped.num_given_back

    def save(self, what: Given, how: How, mapped: Mapped, arena: tuple[Bytes | None, int]) -> int:
        """mapped: as in `load`; arena: the staging area, and the size that was asked for."""
        memory, asked = arena
        if self._is_direct:
            self._use(mapped)
        elif memory is None:
            return NOT_PLAIN
        elif memory is not self._arena:
            self._arena = memory
            self.last.arena, self.last.arena_bytes = address_of(memory), len(memory)
        self.last.arena_asked = asked
        if isinstance(what, c.Plan):
            return int(self._save_plan(self._address, what, ctypes.addressof(how)))
        return int(self._save(self._address, *what, how))

    def exists(self, hashes: object, how: How) -> int:
        """For full blocks; result in `last.count`."""
        return int(self._exists(self._address, hashes, how))
