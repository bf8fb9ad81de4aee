"""Segments: the memory of a tenant's pool, as anonymous files that clients can map but not change.

They have no name in any file system: when the agent has ended and the last client unmaps them, the kernel frees the
memory.
"""

import contextlib
import errno
import fcntl
import os

from ems.common.memory import HUGE_PAGE_BYTES, advise, map_shared
from ems.runs import Bytes
from kvloom.pool.storage.entries import Geometry
from kvloom.pool.storage.headroom import Headroom

_F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h; not in Python's fcntl
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MADV_COLLAPSE = 25  # Linux 6.1

_MFD_HUGETLB = 0x4
_MADV_HUGEPAGE = 14
_MERGED = "huge pages that the kernel merges; none are reserved (vm.nr_hugepages)"
_SHMEM_SWITCH = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"


class SharedMemory:
    """A mapped memfd of `size` bytes. `data` is the agent's writable view; `fd` goes to clients."""

    def __init__(self, name: str, size: int, is_sealed: bool, has_huge_pages: bool = False) -> None:
        """is_sealed: receivers of `fd` may only map it for reading. Its size is fixed either way. has_huge_pages: use
        pages that the administrator reserved, else transparent huge pages, else normal ones.
        """
        self.size = size
        self._can_merge = True  # until the kernel refuses
        self.fd, self.data = _reserved(name, size) if has_huge_pages else _ordinary(name, size)
        try:
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals | (_F_SEAL_FUTURE_WRITE if is_sealed else 0))
        except BaseException:
            os.close(self.fd)
            raise

    @property
    def is_reserved(self) -> bool:
        """Whether it consists of reserved huge pages."""
        return os.fstat(self.fd).st_blksize >= HUGE_PAGE_BYTES

    def prefault(self, start: int, size: int) -> bool:
        """Make the kernel provide the pages of a range now; first writes would cost ten times as much later.

        Huge pages if possible (since 6.1), because a client pays for each page that it reads first. False where it is
        not possible (before 5.14, or out of memory): then pages come when touched.
        """
        if self._can_merge:
            self._merge(-(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, start + size)
        return advise(self.data[start : start + size], _MADV_POPULATE_WRITE) == 0

    @property
    def is_merged(self) -> bool:
        """Whether the kernel has not refused transparent huge pages yet."""
        return self._can_merge

    def _merge(self, start: int, stop: int) -> None:
        """From the next huge page boundary on. One call, because each one waits for all cores."""
        whole = self.data[start : stop // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES]
        if len(whole):
            whole[::HUGE_PAGE_BYTES].max()  # the kernel merges only where there is a page already
            self._can_merge = advise(whole, _MADV_COLLAPSE) in (0, errno.EAGAIN)

    def close(self) -> None:
        """Closes the descriptor; the mapping goes with the last view of it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def take_slab(
    segments: list[SharedMemory | None], is_first: bool, size: int, geometry: Geometry, headroom: Headroom
) -> SharedMemory | None:
    """The segment of a slab of `size` bytes: the last of `segments`, or, for the first slab of one, a new one, which is
    appended. Raises OSError when the system has no memory, or would have too little for others.
    """
    if not is_first:
        segment = segments[-1]
    else:
        segment = SharedMemory("ems-pool", geometry.segment_bytes, geometry.is_sealed, geometry.has_huge_pages)
    if segment is not None and not segment.is_reserved:
        try:
            headroom.require(size)
        except OSError:
            if is_first:
                segment.close()
            raise
    if is_first:
        segments.append(segment)
    return segment


def _ordinary(name: str, size: int) -> tuple[int, Bytes]:
    return _mapped(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), size)


def _reserved(name: str, size: int) -> tuple[int, Bytes]:
    """Of reserved huge pages; without enough of them, ordinary memory that the kernel may merge into huge pages."""
    try:
        if size % HUGE_PAGE_BYTES:
            raise OSError(f"a segment of {size} bytes is not made of pages of {HUGE_PAGE_BYTES}")
        return _mapped(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | _MFD_HUGETLB), size)
    except OSError:
        fd, memory = _ordinary(name, size)
        with contextlib.suppress(OSError):
            advise(memory, _MADV_HUGEPAGE)
        return fd, memory


def _mapped(fd: int, size: int) -> tuple[int, Bytes]:
    try:
        os.ftruncate(fd, size)
        return fd, map_shared(fd, size, is_writable=True)
    except BaseException:
        os.close(fd)
        raise


def huge_pages_in_use(is_prefaulted: bool) -> str:
    """What memory with huge pages would be made of now, for people."""
    probe = SharedMemory("ems-probe", HUGE_PAGE_BYTES, is_sealed=True, has_huge_pages=True)
    is_reserved = probe.is_reserved
    is_merged = is_prefaulted and probe.prefault(0, HUGE_PAGE_BYTES) and probe.is_merged
    probe.close()
    if is_reserved:
        return "reserved huge pages of 2 MiB"
    if is_merged:
        return _MERGED
    try:
        with open(_SHMEM_SWITCH) as switch:
            mode = switch.read().partition("[")[2].partition("]")[0]
    except OSError:
        mode = "never"
    if mode in ("advise", "always", "within_size", "force"):
        return _MERGED
    return f"ordinary pages: no huge pages are reserved (vm.nr_hugepages), and {_SHMEM_SWITCH} says {mode}"
