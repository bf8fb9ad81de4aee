"""Memory of KV blocks that nobody needs, given back to the system while the rest of the cache stays."""

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

_MADV_DONTNEED, _MADV_REMOVE = 4, 9  # of private and of shared memory; the other one fails
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def release_blocks(layers: Sequence[Sequence[Any]], blocks: Sequence[int]) -> int:
    """Give back the whole pages of `blocks`, which read as zeros afterwards. Returns their bytes.

    layers: of a KvMemory, tensors [num_blocks, ...]. Memory of a device stays.
    """
    total = 0
    for layer in layers:
        for side in layer:
            try:
                array = np.asarray(side)
            except TypeError:  # on a device
                return total
            for start, end in _runs(blocks):
                total += _release(array.ctypes.data, start * array.strides[0], end * array.strides[0])
    return total


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranges [start, end) of the numbers in ascending `blocks`."""
    start = end = None
    for block in blocks:
        if block != end:
            if start is not None and end is not None:
                yield start, end
            start = block
        end = block + 1
    if start is not None and end is not None:
        yield start, end


def _release(base: int, start: int, end: int) -> int:
    first = -(-(base + start) // mmap.PAGESIZE) * mmap.PAGESIZE
    num_bytes = (base + end) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if num_bytes <= 0:
        return 0
    is_done = any(_libc.madvise(first, num_bytes, advice) == 0 for advice in (_MADV_REMOVE, _MADV_DONTNEED))
    return num_bytes if is_done else 0
