"""Segments: the memory of a tenant's pool, as anonymous files that clients can map but not change.

No name in any file system: when the agent is gone and the last client unmaps, the kernel takes the memory back.
"""

import fcntl
import mmap
import os

import numpy as np
import numpy.typing as npt

_F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h; not in Python's fcntl
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_PREFAULT_STEP_BYTES = 2 << 20  # a step holds the interpreter lock for about a millisecond

Bytes = npt.NDArray[np.uint8]


class SharedMemory:
    """A mapped memfd of `size` bytes. `data` is the agent's writable view; `fd` goes to clients."""

    def __init__(self, name: str, size: int, is_sealed: bool) -> None:
        """is_sealed: whoever receives `fd` may map it for reading only. Its size is fixed either way."""
        self.size = size
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
            self._map = mmap.mmap(self.fd, size)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals | (_F_SEAL_FUTURE_WRITE if is_sealed else 0))
        except BaseException:
            os.close(self.fd)
            raise
        self.data: Bytes = np.frombuffer(self._map, np.uint8)

    def prefault(self, start: int, size: int) -> bool:
        """Has the kernel provide the pages of a range now; a first write later would pay ten times over.

        Returns False where the kernel cannot (before 5.14, or out of memory): then pages come when touched.
        """
        for offset in range(start, start + size, _PREFAULT_STEP_BYTES):
            try:
                self._map.madvise(_MADV_POPULATE_WRITE, offset, min(_PREFAULT_STEP_BYTES, start + size - offset))
            except (OSError, ValueError):
                return False
        return True

    def close(self) -> None:
        """Closes the descriptor; the mapping goes with the last view of it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
