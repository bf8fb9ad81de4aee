"""Memory of this machine, and limits of this process's control groups (version 2 or 1) and of its own resources."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

_UNLIMITED_BYTES = 1 << 60  # control groups of version 1 say "no limit" with a huge number
_FILES = (  # below sys/fs/cgroup: limits, use, what of it is files that were read and can go
    ("", ("memory.max", "memory.high"), "memory.current", "inactive_file"),
    ("memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
)
_OWN = ((resource.RLIMIT_AS, "VmSize:"), (resource.RLIMIT_DATA, "VmData:"))


def memory_limit(root: Path = Path("/")) -> tuple[int | None, int]:
    """Limit and use, in bytes, of the control group or parent that has the least left; (None, 0) = no limit."""
    return min(memory_limits(root), key=lambda pair: pair[0] - pair[1], default=(None, 0))


def memory_limits(root: Path = Path("/")) -> list[tuple[int, int]]:
    """Limit and use, in bytes, of the control group and its parents, where they have one. `root` stands for /."""
    found = []
    for folder, limits, use, files in _FILES:
        for group in control_groups(root, folder):
            known = [int(text) for name in limits if (text := _text(group / name).strip()).isdigit()]
            used = _text(group / use).strip()
            if known and used.isdigit() and min(known) < _UNLIMITED_BYTES:
                found.append((min(known), max(0, int(used) - _number(group / "memory.stat", files))))
    return found


def memory_bytes() -> int:
    """Memory of this machine, or what its control groups may use of it."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([whole, *(limit for limit, _used in memory_limits())])


def available_bytes(num_sharing: int = 1, promised_bytes: int = 0) -> int:
    """Memory that this process can take without swapping.

    What the machine and the control groups have is shared evenly by `num_sharing` processes, this one included, and
    `promised_bytes` of a share are for others; what resource limits leave is this process's own.
    """
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    share = min([free, *_left_to_groups()]) // num_sharing - promised_bytes
    return max(0, min([share, *_left_to_process()]))


def memory_left() -> int | None:
    """Bytes that control groups and resource limits (RLIMIT_AS, RLIMIT_DATA) leave this process; None = no limit."""
    left = [*_left_to_groups(), *_left_to_process()]
    return max(0, min(left)) if left else None


def _left_to_groups() -> list[int]:
    limit, used = memory_limit()
    return [] if limit is None else [limit - used]


def _left_to_process() -> list[int]:
    limits = [(resource.getrlimit(kind)[0], name) for kind, name in _OWN]
    status = Path("/proc/self/status")
    return [own - (_number(status, name) << 10) for own, name in limits if own != resource.RLIM_INFINITY]


def control_groups(root: Path, folder: str) -> Iterator[Path]:
    """Folders of this process's control groups and of their parents, as far as they are mounted below `folder`."""
    seen = set()
    mounted = root / "sys/fs/cgroup" / folder
    for line in _text(root / "proc/self/cgroup").splitlines():
        inner = mounted / line.split(":", 2)[2].lstrip("/")
        for group in (inner, *inner.parents):
            if group in seen or not group.is_relative_to(mounted):
                continue
            seen.add(group)
            yield group


def _number(path: Path, name: str) -> int:
    """The number behind `name` in a file of such lines; 0 when there is none."""
    lines = (line.split() for line in _text(path).splitlines())
    return next((int(words[1]) for words in lines if len(words) > 1 and words[0] == name and words[1].isdigit()), 0)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
