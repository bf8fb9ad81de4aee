"""The functions of the SDK's C++ library, as declared there."""

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_int64, c_uint64, c_void_p

from ems.native.build import BLOCKS
from ems.native.library import Xxh3, is_to_be_compiled, load, sums_alike, xxh3

_SUM_BYTES = 16


class Batch(ctypes.Structure):
    """Blocks of the registered cache, as blocks.hpp has them."""

    kept: object  # keeps alive the arrays whose addresses it has
    _fields_ = [
        ("tensors", c_void_p),
        ("num_tensors", c_int64),
        ("num_groups", c_int64),
        ("runs", c_void_p),
        ("edges", c_void_p),
        ("num_blocks", c_int64),
    ]


class Plan(ctypes.Structure):
    """The blocks of a call (plan.hpp)."""

    kept: object  # keeps alive what it has addresses of
    blocks: Batch
    sizes: int
    largest: int
    _fields_ = [("blocks", Batch), ("keys", c_void_p), ("sizes", c_void_p), ("largest", c_int64)]

    def __len__(self) -> int:
        return int(self.blocks.num_blocks)

    def all_sizes(self) -> list[int]:
        """Bytes of each block."""
        return list((c_int64 * len(self)).from_address(self.sizes)) if len(self) else []


class Cache(ctypes.Structure):
    """A registered cache and its names (plan.cpp)."""

    _fields_ = [
        ("tensors", c_void_p),
        ("num_tensors", c_int64),
        ("token_bytes", c_int64),
        ("block_size", c_int64),
        ("num_slots", c_int64),
        ("sha256", c_void_p),
        ("base", c_char_p),
        ("num_base", c_int64),
    ]


class Line(ctypes.Structure):
    """A link."""

    deadline_ns: int
    odd: int
    num_odd: int
    board: int | None
    _fields_ = [
        ("deadline_ns", c_int64),
        ("request_id", c_int64),
        ("odd", c_void_p),
        ("num_odd", c_int64),
        ("board", c_void_p),
    ]


class Segment(ctypes.Structure):
    """A segment of the pool that is mapped into this process."""

    _fields_ = [("number", c_int64), ("memory", c_void_p), ("bytes", c_int64)]


class Load(ctypes.Structure):
    """Blocks to load. Arrays by address."""

    mapped: int | None
    num_mapped: int
    num_given_back: int
    segments: int
    num_found: int
    cause: int
    num_done: int
    corrupt: int
    _fields_ = [
        ("plan", c_void_p),
        ("first", c_int64),
        ("num", c_int64),
        ("is_local", c_int64),
        ("found", c_void_p),
        ("xxh3", POINTER(Xxh3)),
        ("mapped", c_void_p),
        ("num_mapped", c_int64),
        ("num_given_back", c_int64),
        ("segments", c_void_p),
        ("num_found", c_int64),
        ("lease", c_int64),
        ("cause", c_int64),
        ("is_asked", c_int64),
        ("num_done", c_int64),
        ("corrupt", c_int64),
    ]


UNDECIDED, MISSING, LOADED = range(3)  # state of each block of a load (line.hpp)


class Save(ctypes.Structure):
    """Blocks to save. Arrays by address."""

    kept: object  # keeps alive what it has addresses of
    num_done: int
    done_bytes: int
    num_success: int
    num_local: int
    problem: int
    mapped: int | None
    num_mapped: int
    num_given_back: int
    segments: int
    num_found: int
    _fields_ = [
        ("plan", c_void_p),
        ("num", c_int64),
        ("parent", c_char_p),
        ("arena", c_void_p),
        ("region_bytes", c_int64),
        ("num_regions", c_int64),
        ("first_bytes", c_int64),
        ("write_rcache", c_int64),
        ("is_chain", c_int64),
        ("statuses", c_void_p),
        ("num_done", c_int64),
        ("done_bytes", c_int64),
        ("num_success", c_int64),
        ("num_local", c_int64),
        ("problem", c_int64),
        ("xxh3", c_void_p),
        ("mapped", c_void_p),
        ("num_mapped", c_int64),
        ("num_given_back", c_int64),
        ("segments", c_void_p),
        ("num_found", c_int64),
        ("is_asked", c_int64),
    ]


_SIGNATURES = {
    "ems_sum": (None, [POINTER(Xxh3), c_char_p, c_uint64, c_void_p]),
    "ems_gather": (None, [POINTER(Batch), c_void_p, POINTER(Xxh3), c_void_p]),
    "ems_scatter": (c_int64, [POINTER(Batch), c_void_p, c_void_p, POINTER(Xxh3), c_char_p]),
    "ems_plan_close": (None, [POINTER(Plan)]),
    "ems_line_open": (c_void_p, [c_int]),
    "ems_line_close": (None, [POINTER(Line)]),
    "ems_line_exists": (c_int, [POINTER(Line), c_char_p, c_int64, c_int, POINTER(c_int64)]),
    "ems_line_load": (c_int, [POINTER(Line), POINTER(Load)]),
    "ems_cut": (c_int64, [c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p]),
    "ems_calls_open": (c_void_p, [c_void_p]),
    "ems_calls_close": (None, [c_void_p]),
    "ems_call_load_plan": (c_int, [c_void_p, POINTER(Plan), c_void_p]),
    "ems_call_save_plan": (c_int, [c_void_p, POINTER(Plan), c_void_p]),
    "ems_line_save": (c_int, [POINTER(Line), POINTER(Save)]),
    "ems_hash_names": (None, [c_void_p, c_char_p, c_int64, c_void_p, c_int, c_void_p, c_int64, c_int64, c_void_p]),
    "ems_token_names": (None, [c_void_p, c_char_p, c_int64, c_void_p, c_int64, c_int64, c_void_p]),
}


def _prepare(library: ctypes.CDLL) -> None:
    """Declare the functions. Raises OSError when the library's checksums differ from Python's."""
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments

    def sum_of(data: bytes) -> bytes:
        out = ctypes.create_string_buffer(_SUM_BYTES)
        library.ems_sum(xxh3(), data, len(data), out)
        return out.raw

    if not sums_alike(sum_of):
        raise OSError("its sums are not those of xxhash")


def functions() -> ctypes.CDLL | None:
    """The library; None where it is not available. The first time on a machine it is compiled."""
    return load(BLOCKS, _prepare)


def functions_at_hand() -> ctypes.CDLL | None:
    """The library, if it need not be compiled first: a call has a deadline."""
    return None if is_to_be_compiled(BLOCKS) else functions()
