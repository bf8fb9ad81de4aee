"""Shared memory, mapped at addresses at which the kernel can map it in huge pages."""

import ctypes
import errno
import mmap
import os
import weakref

import numpy as np

from ems.runs import Bytes, address_of

HUGE_PAGE_BYTES = 2 << 20
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_munmap = _libc.munmap
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_madvise = _libc.madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def map_shared(fd: int, size: int, is_writable: bool) -> Bytes:
    """The first `size` bytes of a file; unmapped when no reference is left. Raises OSError."""
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
    found = os.fstat(fd)
    if found.st_size < size:
        raise OSError(errno.EINVAL, f"a file of {found.st_size} bytes is to be mapped as {size}")
    step = max(HUGE_PAGE_BYTES, found.st_blksize)
    reserved = _mapped(None, size + step, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
    address = -(-reserved // step) * step
    try:
        _mapped(address, size, protection, mmap.MAP_SHARED | _MAP_FIXED, fd)
    except OSError:
        _munmap(reserved, size + step)
        raise
    pages_end = -(-(address + size) // mmap.PAGESIZE) * mmap.PAGESIZE
    for start, end in ((reserved, address), (pages_end, reserved + size + step)):
        if end > start:
            _munmap(start, end - start)
    owner = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(owner, _munmap, address, size).atexit = False
    memory: Bytes = np.frombuffer(memoryview(owner), np.uint8)
    memory.flags.writeable = is_writable
    return memory


def _mapped(address: int | None, size: int, protection: int, flags: int, fd: int) -> int:
    found: int = _mmap(address, size, protection, flags, fd, 0)
    if found == _FAILED:
        problem = ctypes.get_errno()
        raise OSError(problem, os.strerror(problem))
    return found


def advise(memory: Bytes, advice: int) -> int:
    """madvise, without the interpreter's lock. 0, or an error number."""
    return ctypes.get_errno() if _madvise(address_of(memory), len(memory), advice) else 0
