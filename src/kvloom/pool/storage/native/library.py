"""The C++ library of `NativePool`: its structures and functions, as api.cpp and batch.hpp have them."""

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_int, c_int64, c_uint8, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

from ems.keys import KEY_BYTES
from ems.native.build import Library
from ems.native.library import Xxh3, load, xxh3
from ems.wire.messages import SUM_BYTES

INDEX = Library("libkvloom_pool", Path(__file__).parent)
NONE = 0xFFFF_FFFF  # not a block's number
LEFT = 255  # status: its memory is being given back
DONE, MORE, NEEDS_MEMORY = 0, 1, 2
AGAIN = -2  # not a number of bytes: call again

Key = c_uint8 * KEY_BYTES
Sum = c_uint8 * SUM_BYTES


LOOK, GROW, REFUSE = ctypes.CFUNCTYPE(None), ctypes.CFUNCTYPE(c_int), ctypes.CFUNCTYPE(c_int, POINTER(Key), c_uint32)


class Counts(ctypes.Structure):
    """Counters of sessions that C++ serves (handle.hpp); saved: by `Status`, missed: by `Cause`."""

    num_calls: int
    saved: Any
    missed: Any
    load_keys: int
    load_hits: int
    corrupt: int
    _fields_ = [
        ("num_calls", c_uint64),
        ("saved", c_uint64 * 8),
        ("missed", c_uint64 * 8),
        ("load_keys", c_uint64),
        ("load_hits", c_uint64),
        ("corrupt", c_uint64),
        ("denied_leases", c_uint64),
    ]


class Glance(ctypes.Structure):
    """Figures read without a call; the last three are written by Python, from the budget."""

    num_evicted: int
    num_given_back: int
    num_left: int
    counts: Counts
    quota: int
    may_grow: int
    looked_at: int
    _fields_ = [
        ("num_evicted", c_uint64),
        ("num_given_back", c_uint64),
        ("num_left", c_uint64),
        ("counts", Counts),
        ("quota", c_int64),
        ("may_grow", c_int64),
        ("looked_at", c_uint64),
    ]


MAY_PUT = ctypes.CFUNCTYPE(c_int, c_int64)
ROUTE = ctypes.CFUNCTYPE(None, c_void_p, c_int64, c_void_p)
SEND_NOW = ctypes.CFUNCTYPE(c_int, POINTER(Key), c_void_p, c_int64, POINTER(Key), c_int64)
SEND_LATER = ctypes.CFUNCTYPE(None, POINTER(c_uint32), POINTER(POINTER(Key)), c_int64, c_int64, c_void_p)


class Callbacks(ctypes.Structure):
    """Python functions that sessions call (serving.hpp)."""

    _fields_ = [
        ("look", LOOK),
        ("grow", GROW),
        ("refuse", REFUSE),
        ("close_left", LOOK),
    ]


class Node(ctypes.Structure):
    """Python functions that saves call (serving.hpp); those that are not set are null."""

    _fields_ = [
        ("may_put", MAY_PUT),
        ("route", ROUTE),
        ("send_now", SEND_NOW),
        ("send_later", SEND_LATER),
    ]


class Terms(ctypes.Structure):
    """How a session is served (serving.hpp)."""

    _fields_ = [
        ("node", Node),
        ("copies_share", c_double),
        ("budget_version", POINTER(c_uint64)),
        ("keyring_version", POINTER(c_uint64)),
        ("is_direct", c_int64),
        ("board", c_void_p),
    ]


class Save(ctypes.Structure):
    """A batch of blocks to write. Arrays by address, `num` elements each."""

    num_done: int
    may_grow: int
    _fields_ = [
        ("keys", c_char_p),
        ("lengths", c_void_p),
        ("is_rcache", c_void_p),
        ("areas", c_void_p),
        ("parent", c_char_p),
        ("statuses", c_void_p),
        ("ids", c_void_p),
        ("offsets", c_void_p),
        ("num", c_int64),
        ("num_done", c_int64),
        ("copies_limit", c_double),
        ("may_grow", c_int64),
        ("is_chain", c_int64),
        ("goes_on", c_int64),
        ("batch", c_void_p),
    ]


class Arrival(ctypes.Structure):
    """Blocks of another node that have arrived, or not (batch.hpp). Arrays by address, `num` elements each."""

    _fields_ = [
        ("keys", c_char_p),
        ("lengths", c_void_p),
        ("announced", c_char_p),
        ("parents", c_char_p),
        ("found", c_void_p),
        ("offsets", c_void_p),
        ("statuses", c_void_p),
        ("ids", c_void_p),
        ("num", c_int64),
        ("is_rcache", c_int64),
    ]


class Eviction(ctypes.Structure):
    """An order to evict, and its progress. Bytes, except the last two."""

    freed: int
    closed_bytes: int
    _fields_ = [(name, c_int64) for name in ("size", "freed", "closed_bytes", "segment", "has_segments")]


class Described(ctypes.Structure):
    """The state of a pinned block when it was asked for."""

    key: Any
    sum: Any
    parent: Any
    offset: int
    born: int
    length: int
    slot: int
    pins: int
    is_rcache: int
    is_home: int
    is_live: int
    has_parent: int
    _fields_ = [
        ("key", Key),
        ("sum", Sum),
        ("parent", Key),
        ("offset", c_uint64),
        ("born", c_uint64),
        ("length", c_uint32),
        ("slot", c_uint32),
        ("pins", c_uint32),
        ("is_rcache", c_uint8),
        ("is_home", c_uint8),
        ("is_live", c_uint8),
        ("has_parent", c_uint8),
    ]


class Usage(ctypes.Structure):
    """Bytes, but for the first and the last."""

    num_blocks: int
    used_bytes: int
    capacity: int
    rcache_bytes: int
    num_missing: int
    num_slabs: int
    _fields_ = [
        (name, c_int64) for name in ("num_blocks", "used_bytes", "capacity", "rcache_bytes", "num_missing", "num_slabs")
    ]


class Functions(NamedTuple):
    """of_batches: functions that release the interpreter lock, because they copy or may take long; short: those that
    keep it. Neither waits for it while it holds a pool.
    """

    of_batches: ctypes.CDLL
    short: ctypes.PyDLL
    xxh3: Xxh3


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "pool_open": (c_void_p, [c_int64, c_int64, c_int, c_uint64]),
    "pool_close": (None, [c_void_p]),
    "pool_glance": (POINTER(Glance), [c_void_p]),
    "pool_save": (c_int, [c_void_p, POINTER(Xxh3), POINTER(Save)]),
    "pool_begin": (c_int, [c_void_p, POINTER(Save), c_void_p]),
    "pool_settle": (None, [c_void_p, POINTER(Arrival)]),
    "pool_abandon_batch": (None, [c_void_p, POINTER(Save)]),
    "pool_publish": (c_int, [c_void_p, POINTER(Described), c_void_p, POINTER(c_uint32)]),
    "pool_abandon": (None, [c_void_p, c_uint64]),
    "pool_pin_prefix": (c_int64, [c_void_p, c_void_p, c_int64, *[c_void_p] * 4]),
    "pool_pin_each": (None, [c_void_p, c_void_p, c_int64, *[c_void_p] * 3]),
    "pool_pin_again": (None, [c_void_p, c_uint32]),
    "pool_unpin": (None, [c_void_p, c_void_p, c_int64]),
    "pool_has": (None, [c_void_p, c_void_p, c_int64, c_void_p]),
    "pool_count_prefix": (c_int64, [c_void_p, c_void_p, c_int64]),
    "pool_missed": (c_int, [c_void_p, c_void_p, c_int64]),
    "pool_remember": (None, [c_void_p, c_void_p, c_int]),
    "pool_describe": (None, [c_void_p, c_uint32, POINTER(Described)]),
    "pool_set_home": (None, [c_void_p, c_uint32, c_uint64, c_int]),
    "pool_spoil": (c_int, [c_void_p, c_uint32]),
    "pool_make_room_ahead": (c_int, [c_void_p, c_uint32, c_int64, c_int64, c_int]),
    "pool_grow": (None, [c_void_p, c_int64, c_void_p]),
    "pool_evict": (c_int, [c_void_p, POINTER(Eviction)]),
    "pool_shrink": (c_int64, [c_void_p, POINTER(c_int64)]),
    "pool_take_left": (c_int64, [c_void_p]),
    "pool_usage": (None, [c_void_p, POINTER(Usage)]),
    "pool_keys": (c_int64, [c_void_p, c_void_p, c_int64]),
    "pool_check": (c_char_p, [c_void_p]),
    "serving_open": (c_void_p, [c_void_p, c_int, POINTER(Xxh3), POINTER(Callbacks), POINTER(Terms)]),
    "serving_feed": (None, [c_void_p, c_void_p, c_int64]),
    "serving_use_arena": (None, [c_void_p, c_void_p, c_int64]),
    "serving_next": (c_int, [c_void_p, c_uint64, POINTER(c_void_p), POINTER(c_int64)]),
    "serving_has_frame": (c_int, [c_void_p]),
    "serving_close": (None, [c_void_p]),
}


def declare(library: ctypes.CDLL) -> None:
    """Says what its functions take and return. Raises AttributeError when one is missing."""
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


def functions() -> Functions | None:
    """Those of the library; None where it cannot be had."""
    library, summing = load(INDEX, declare), xxh3()
    if library is None or summing is None:
        return None
    short = ctypes.PyDLL(str(INDEX.path()))
    declare(short)
    return Functions(library, short, summing)
