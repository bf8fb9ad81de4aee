"""What this machine has of memory, and what a user is told when it was not enough."""

import contextlib
import importlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from kvloom.engine.errors import ModelError, OutOfMemory

_NO_MEMORY = re.compile("not enough memory|out of memory|Cannot allocate memory", re.IGNORECASE)


@contextlib.contextmanager
def says_what_to_lower() -> Iterator[None]:
    """An allocation that failed although the sizes were planned: somebody else took the memory meanwhile."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        is_memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or _NO_MEMORY.search(str(error))
        if not is_memory:
            raise
        raise OutOfMemory(
            "out of memory: the weights and the KV cache do not fit; lower kv_cache_bytes (npuMemSize), or "
            f"host_cache_bytes (cpuMemSize) where it is given ({error})"
        ) from error


def check_device(device: str) -> None:
    """Raises ModelError when this torch has no such device: "cpu", "cuda", "npu", or one of several ("cuda:1")."""
    kind = device.partition(":")[0]
    if kind == "npu":
        with contextlib.suppress(ImportError):
            importlib.import_module("torch_npu")  # adds torch.npu
    if kind != "cpu" and not (hasattr(torch, kind) and getattr(torch, kind).is_available()):
        raise ModelError(
            f"device: torch {torch.__version__} sees no {kind} here; install its build for {kind}, or take cpu"
        )


def device_bytes(device: str) -> int:
    """Free memory of a device that has memory of its own."""
    return int(getattr(torch, device.partition(":")[0]).mem_get_info(device)[0])


def available_bytes() -> int:
    """Memory that can be taken without swapping: of the machine, or of the control group where that is less."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    with contextlib.suppress(OSError, ValueError):  # no limit reads "max"
        free = min(free, max(0, int(limit.read_text()) - int(used.read_text())))
    return free
