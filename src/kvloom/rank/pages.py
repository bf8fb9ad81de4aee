"""Physical memory of KV blocks: provided ahead of use, or given back while the rest stays.

layers: for each layer its tensors [blocks, ...] in host memory. Memory of a device is left alone.
"""

import ctypes
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvloom.contract.capacity import Ahead
from kvloom.limits import available_bytes

_MADV_DONTNEED, _MADV_REMOVE = 4, 9  # for private and for shared memory; the other one fails
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_STEP_BYTES = 8 << 20  # provided in one call, before checking again what is wanted
_NICENESS = 19
_REST_S = 3.0  # without a step: the rank is at rest
_SHARE_OF_LEFT = 4  # at rest, at most a quarter of the available memory is taken


def release_blocks(layers: Sequence[Sequence[Any]], blocks: Sequence[int]) -> int:
    """Give the whole pages of `blocks` back to the system; they read as zeros afterwards. Returns their bytes."""
    total = 0
    for address, num_bytes in _runs_of_blocks(layers):
        stride = num_bytes // len(layers[0][0])
        for start, end in _runs(blocks):
            total += _release(address + start * stride, address + end * stride)
    return total


class PagesAhead:
    """Makes the system provide blocks' memory before they are written, in a thread of the lowest priority.

    The first write to a page costs 2 to 15 us in the middle of a step, and more on virtual machines whose host takes
    free memory back. Blocks are first handed out in order, so the thread stays ahead of the highest block in use so
    far, by as much as is in use. At rest, when its core is idle, it goes on to `ahead.at_rest` bytes beyond that
    block, within a quarter of the available memory. No more memory is taken.
    """

    def __init__(self, layers: Sequence[Sequence[Any]], num_blocks: int, ahead: Ahead) -> None:
        """`num_blocks`: of the whole cache, as `use` counts them."""
        self._layers = layers  # the thread writes to the tensors' memory: these references keep it alive
        self._memory = list(_runs_of_blocks(layers))
        self._num_blocks = num_blocks
        self._block_bytes = max(1, sum(num_bytes for _address, num_bytes in self._memory) // num_blocks)
        self._ahead = Ahead(*(max(1, num_bytes // self._block_bytes) for num_bytes in ahead))  # blocks
        self._step = max(1, _STEP_BYTES // self._block_bytes)
        self.num_wanted = min(num_blocks, self._ahead.least)  # leading blocks whose memory is or will be provided
        self._num_used: int | None = 0  # leading blocks that were in use; None = released, and unused since
        # Number of calls of use() and forget(), read by the thread. No lock, because a step must not wait for a thread
        # of the lowest priority.
        self._num_uses = self._num_forgotten = 0
        self._is_resting = False
        self._has_changed = threading.Event()
        self._has_changed.set()
        if self._memory:
            threading.Thread(target=self._run, name="kv-pages", daemon=True).start()

    def use(self, block: int) -> None:
        """Block `block` is in use, or about to be."""
        self._num_uses += 1
        self._num_used = max(self._num_used or 0, block + 1)
        ahead = min(max(block + 1, self._ahead.least), self._ahead.most)
        wanted = min(self._num_blocks, block + 1 + ahead)
        if wanted > self.num_wanted:
            self.num_wanted = wanted
            self._has_changed.set()
        elif self._is_resting:
            self._has_changed.set()

    def forget(self) -> None:
        """Memory of blocks was given back: begin anew."""
        self.num_wanted = min(self._num_blocks, self._ahead.least)
        self._num_used = None
        self._num_forgotten += 1
        self._has_changed.set()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        provided = num_forgotten = 0  # blocks provided, from the first; value of the counter then
        while True:
            num_uses = self._num_uses
            has_changed = self._has_changed.wait(None if self._is_resting else _REST_S)
            self._is_resting = not has_changed and num_uses == self._num_uses
            self._has_changed.clear()
            at_rest = self._wanted_at_rest(provided) if self._is_resting else 0
            while True:
                wanted = self.num_wanted  # read first: a `forget` after this costs one superfluous pass, no more
                if num_forgotten != self._num_forgotten:
                    provided, num_forgotten, at_rest = 0, self._num_forgotten, 0
                if num_uses == self._num_uses:
                    wanted = max(wanted, at_rest)
                if provided >= wanted:
                    break
                end = min(wanted, provided + self._step)
                if not all(self._provide(address, num_bytes, provided, end) for address, num_bytes in self._memory):
                    return  # the system cannot, or has no memory left: pages come when they are written
                provided = end

    def _wanted_at_rest(self, provided: int) -> int:
        """Number of blocks, from the first, that shall have memory at rest. `provided`: how many have it."""
        if self._num_used is None:
            return 0
        left = available_bytes() // _SHARE_OF_LEFT // self._block_bytes
        return min(self._num_blocks, self._num_used + self._ahead.at_rest, provided + left)

    def _provide(self, address: int, num_bytes: int, start: int, end: int) -> bool:
        first = address + num_bytes * start // self._num_blocks
        last = address + num_bytes * end // self._num_blocks
        first -= first % mmap.PAGESIZE
        return bool(_libc.madvise(first, last - first, _MADV_POPULATE_WRITE) == 0)


def _runs_of_blocks(layers: Sequence[Sequence[Any]]) -> Iterator[tuple[int, int]]:
    """Address and bytes of each contiguous piece of block memory: one a tensor in host memory, or one for all tensors
    whose blocks interleave.
    """
    try:
        arrays = [np.asarray(side) for layer in layers for side in layer]
    except TypeError:  # on a device
        return
    second = 0  # address of the second block
    for array in sorted(arrays, key=lambda array: array.ctypes.data):
        if array.ctypes.data >= second:
            second = array.ctypes.data + array.strides[0]
            yield array.ctypes.data, array.strides[0] * len(array)


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranges [start, end) of consecutive numbers in ascending `blocks`."""
    start = end = None
    for block in blocks:
        if block != end:
            if start is not None and end is not None:
                yield start, end
            start = block
        end = block + 1
    if start is not None and end is not None:
        yield start, end


def _release(start: int, end: int) -> int:
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    num_bytes = end // mmap.PAGESIZE * mmap.PAGESIZE - first
    if num_bytes <= 0:
        return 0
    is_done = any(_libc.madvise(first, num_bytes, advice) == 0 for advice in (_MADV_REMOVE, _MADV_DONTNEED))
    return num_bytes if is_done else 0
