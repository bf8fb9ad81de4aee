"""From a call's arguments to blocks in one call: positions and names.

C++ reads the caller's lists and arrays with functions of this interpreter, whose addresses it is given. Names use the
SHA-256 of the library that Python's hashlib calls.
"""

import ctypes
import hashlib
import importlib
import sys
import sysconfig
from array import array
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ems.native.functions import Cache, Plan, functions_at_hand
from ems.native.tensors import NativeHostTensors
from ems.runs import Blocks, Numbers, address_of

NAME_BYTES = 32
_found: list["Sha256 | None"] = []
_PLAN = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.py_object] * 3)
_NAMES = ("SHA256_Init", "SHA256_Update", "SHA256_Final")
_python: list["Python | None"] = []
_FUNCTIONS = (
    "PyList_Size",
    "PyList_GetItem",
    "PyTuple_Size",
    "PyTuple_GetItem",
    "PyObject_Type",
    "Py_DecRef",
    "PyLong_AsLongLong",
    "PyLong_AsUnsignedLongLong",
    "PyErr_Occurred",
    "PyErr_Clear",
    "PyObject_GetBuffer",
    "PyBuffer_Release",
    "PyEval_SaveThread",
    "PyEval_RestoreThread",
)
_TYPES = (list, tuple, int, np.ndarray)


class Python(ctypes.Structure):
    """Addresses of functions of Python's stable ABI, and of types (given.hpp)."""

    _fields_ = [(name, ctypes.c_void_p) for name in (*_FUNCTIONS, *(kind.__name__ for kind in _TYPES))]


def python_functions() -> Python | None:
    """Those of this interpreter; None where it does not export them."""
    if not _python:
        _python.append(_look_for_functions())
    return _python[0]


def _look_for_functions() -> Python | None:
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None  # lists are read under the interpreter's lock
    try:
        addresses = [ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value for name in _FUNCTIONS]
    except AttributeError:
        return None
    return Python(*addresses, *map(id, _TYPES))


class Sha256(ctypes.Structure):
    """Addresses of the functions (names.cpp)."""

    _fields_ = [(name, ctypes.c_void_p) for name in _NAMES]


class NativeNames:
    """Names as of `KeySpace`, packed one after the other. base: the common prefix of their input."""

    def __init__(self, library: ctypes.CDLL, sha256: Sha256) -> None:
        self._library = library
        self.sha256 = sha256
        self._sha256 = ctypes.pointer(sha256)

    def of_hashes(self, base: bytes, values: Sequence[int], counts: "npt.NDArray[np.int64]") -> bytes | None:
        """By prefix hashes. counts [values, groups]: tokens. None for integers beyond 64 bits."""
        numbers = _numbers(values)
        if numbers is None:
            return None
        num, counts = len(numbers), np.ascontiguousarray(counts)
        out = np.empty(num * NAME_BYTES, np.uint8)
        num_groups, is_signed = counts.size // max(1, num), numbers.typecode == "q"
        address, _length = numbers.buffer_info()
        to, of_counts = address_of(out), address_of(counts)
        self._library.ems_hash_names(self._sha256, base, len(base), address, is_signed, of_counts, num_groups, num, to)
        return out.tobytes()

    def of_tokens(self, base: bytes, tokens: "npt.NDArray[np.int64]", block_size: int) -> bytes:
        """Of the blocks of a token sequence."""
        tokens = np.ascontiguousarray(tokens)
        out = np.empty(-(-len(tokens) // block_size) * NAME_BYTES, np.uint8)
        to, num = address_of(out), len(tokens)
        self._library.ems_token_names(self._sha256, base, len(base), address_of(tokens), num, block_size, to)
        return out.tobytes()


class OwnedPlan(Plan):
    """A plan in memory that C++ owns."""

    close: Callable[[Plan], None]

    def __del__(self) -> None:
        self.close(self)


class Planner:
    """Plans calls under hash semantics by a registered cache without layer groups, in C++."""

    def __init__(
        self,
        functions: tuple[ctypes.CDLL, Python],
        tensors: NativeHostTensors,
        slots: tuple[int, int],
        names: tuple[Sha256, bytes],
    ) -> None:
        """slots: tokens a block of the cache, and number of blocks. names: the hash, and its common prefix."""
        (library, python), (sha256, base) = functions, names
        table = tensors.table
        self._kept = tensors, sha256, base, python
        token_bytes = int(table[:, 2].sum())
        self._cache = Cache(
            address_of(table), len(table), token_bytes, *slots, ctypes.addressof(sha256), base, len(base)
        )
        self.address = ctypes.addressof(self._cache)
        self.python_address = ctypes.addressof(python)
        self._plan = _PLAN(("ems_plan", library))
        self._close = library.ems_plan_close

    def plan(self, slot_mapping: object, hashes: object, offsets: object) -> Plan | None:
        """The result of `blocks.plan`; None where Python must do it: arguments that are not plain, or wrong."""
        found = self._plan(self.python_address, self.address, slot_mapping, hashes, offsets)
        if found is None:
            return None
        plan = OwnedPlan.from_address(found)
        plan.close, plan.kept = self._close, self._kept
        return plan


def native_planner(tensors: object, slots: tuple[int, int], base: bytes) -> Planner | None:
    """For host tensors; None without the library, or where C++ cannot call Python's SHA-256."""
    library, sha256, python = functions_at_hand(), _hashlibs(), python_functions()
    if library is None or sha256 is None or python is None or not isinstance(tensors, NativeHostTensors):
        return None
    return Planner((library, python), tensors, slots, (sha256, base))


def native_cut(slots: Numbers, counts: list[int], block_size: int, num_slots: int) -> Blocks | None:
    """The runs of each block; `counts` are its tokens, and there are as many slots.

    None without the library, and where a slot is outside the cache or named twice: Python reports which.
    """
    library = functions_at_hand()
    if library is None:
        return None
    tokens, num = np.array(counts, np.int64), len(slots)
    runs, edges = np.empty((num, 3), np.int64), np.empty(len(tokens) + 1, np.int64)
    slots = np.ascontiguousarray(slots)
    num_runs = library.ems_cut(
        address_of(slots),
        num,
        address_of(tokens),
        len(tokens),
        block_size,
        num_slots,
        address_of(runs),
        address_of(edges),
    )
    return Blocks(runs[:num_runs], edges) if num_runs >= 0 else None


def native_names() -> NativeNames | None:
    """None without the library, or where C++ cannot call Python's SHA-256."""
    library, sha256 = functions_at_hand(), _hashlibs()
    return NativeNames(library, sha256) if library is not None and sha256 is not None else None


def _numbers(values: Sequence[int]) -> "array[int] | None":
    for typecode in "qQ":
        try:
            return array(typecode, values)
        except OverflowError:
            continue
    return None


def _hashlibs() -> Sha256 | None:
    """hashlib's functions; None where its library does not export them, or computes something else."""
    if not _found:
        _found.append(_look_for_sha256())
    return _found[0]


def _look_for_sha256() -> Sha256 | None:
    try:
        opened = ctypes.CDLL(importlib.import_module("_hashlib").__file__)  # and the libraries that it is linked with
        found = Sha256(*(ctypes.cast(getattr(opened, name), ctypes.c_void_p).value for name in _NAMES))
    except (ImportError, OSError, AttributeError, TypeError):
        return None
    state, digest = ctypes.create_string_buffer(256), ctypes.create_string_buffer(NAME_BYTES)
    opened.SHA256_Init(state)
    opened.SHA256_Update(state, b"ems", ctypes.c_size_t(3))
    opened.SHA256_Final(digest, state)
    return found if digest.raw == hashlib.sha256(b"ems").digest() else None
