"""Names of many blocks in one call, with the SHA-256 of the library that Python's hashlib calls."""

import ctypes
import hashlib
import importlib
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ems.native.functions import functions_at_hand
from ems.runs import address_of

NAME_BYTES = 32
_found: list["Sha256 | None"] = []
_NAMES = ("SHA256_Init", "SHA256_Update", "SHA256_Final")


class Sha256(ctypes.Structure):
    """Addresses of the functions, as names.cpp has them."""

    _fields_ = [(name, ctypes.c_void_p) for name in _NAMES]


class NativeNames:
    """As `KeySpace` makes them, packed one after the other. base: what each begins with."""

    def __init__(self, library: ctypes.CDLL, sha256: Sha256) -> None:
        self._library = library
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


def native_names() -> NativeNames | None:
    """None without the library, or where Python's SHA-256 cannot be called from it."""
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
    """hashlib's; None where its library does not show it, or computes something else."""
    if not _found:
        _found.append(_look_for_sha256())
    return _found[0]


def _look_for_sha256() -> Sha256 | None:
    try:
        opened = ctypes.CDLL(importlib.import_module("_hashlib").__file__)  # and what it was linked with
        found = Sha256(*(ctypes.cast(getattr(opened, name), ctypes.c_void_p).value for name in _NAMES))
    except (ImportError, OSError, AttributeError, TypeError):
        return None
    state, digest = ctypes.create_string_buffer(256), ctypes.create_string_buffer(NAME_BYTES)
    opened.SHA256_Init(state)
    opened.SHA256_Update(state, b"ems", ctypes.c_size_t(3))
    opened.SHA256_Final(digest, state)
    return found if digest.raw == hashlib.sha256(b"ems").digest() else None
