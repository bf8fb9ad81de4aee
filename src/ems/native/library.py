"""Loads the pool's C++ libraries, and xxhash's functions for them; logs one line where that is not possible."""

import ctypes
import ctypes.util
import logging
import os
import threading
from collections.abc import Callable

import xxhash

from ems.native.build import BuildError, Library

log = logging.getLogger("ems")
_OFF = "EMS_NATIVE"  # "0": use Python only, as on a machine without a compiler
_lock = threading.Lock()
_loaded: dict[str, ctypes.CDLL | None] = {}
_found: list["Xxh3 | None"] = []
_NAMES = (  # names of each of xxhash's functions, in order of preference
    ("XXH3_128bits_dispatch", "XXH3_128bits"),
    ("XXH3_createState",),
    ("XXH3_freeState",),
    ("XXH3_128bits_reset",),
    ("XXH3_128bits_update_dispatch", "XXH3_128bits_update"),
    ("XXH3_128bits_digest",),
)
_SYSTEM_LIBRARY = "libxxhash.so.0"
_PROBE = bytes(range(256)) * 160  # longer than any of xxhash's short forms, and not a multiple of its blocks


class Xxh3(ctypes.Structure):
    """Addresses of xxhash's functions, as sums.hpp has them."""

    _fields_ = [(names[-1], ctypes.c_void_p) for names in _NAMES]


def load(library: Library, prepare: Callable[[ctypes.CDLL], None]) -> ctypes.CDLL | None:
    """The library, after `prepare` was called once; None without compiler or xxhash, or when EMS_NATIVE is 0.

    The first call on a machine compiles it, which takes some seconds.
    """
    if os.environ.get(_OFF) == "0":
        return None
    with _lock:
        if library.name not in _loaded:
            _loaded[library.name] = _open(library, prepare)
        return _loaded[library.name]


def is_to_be_compiled(library: Library) -> bool:
    """Whether the next `load` would run the compiler."""
    return os.environ.get(_OFF) != "0" and library.name not in _loaded and not library.is_there


def _open(library: Library, prepare: Callable[[ctypes.CDLL], None]) -> ctypes.CDLL | None:
    try:
        if xxh3() is None:
            raise BuildError("xxhash shows no functions to call")
        opened = ctypes.CDLL(str(library.path()))
        prepare(opened)
    except (BuildError, OSError, RuntimeError, AttributeError) as error:
        log.warning("%s is not used, blocks move through Python, which is slower: %s", library.name, error)
        return None
    return opened


def xxh3() -> Xxh3 | None:
    """xxhash's functions: those of the Python package, else the system's; None where neither exports them."""
    if not _found:
        _found.append(next((one for path in (_package(), _SYSTEM_LIBRARY) if (one := _functions(path))), None))
    return _found[0]


def _package() -> str:
    return str(getattr(getattr(xxhash, "_xxhash", None), "__file__", "") or _SYSTEM_LIBRARY)


def _functions(path: str) -> Xxh3 | None:
    try:
        opened = ctypes.CDLL(path)
    except OSError:
        return None
    addresses = []
    for names in _NAMES:
        found = next((getattr(opened, name) for name in names if hasattr(opened, name)), None)
        if found is None:
            return None
        addresses.append(ctypes.cast(found, ctypes.c_void_p).value)
    return Xxh3(*addresses)


def sums_alike(sum_of: Callable[[bytes], bytes]) -> bool:
    """Whether a library's checksums equal those of Python's xxhash."""
    return all(sum_of(_PROBE[:size]) == xxhash.xxh3_128_digest(_PROBE[:size]) for size in (0, 3, 100, 240, 40_000))
