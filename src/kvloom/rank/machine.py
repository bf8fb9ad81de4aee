"""The message when memory was not enough, and memory that goes back to the system."""

import contextlib
import ctypes
import re
from collections.abc import Iterator

from kvloom.contract.errors import OutOfMemory

_NO_MEMORY = re.compile("not enough memory|out of memory|Cannot allocate memory", re.IGNORECASE)


@contextlib.contextmanager
def explain_oom(model: str) -> Iterator[None]:
    """Names the model for which there is no memory. Explains an allocation that failed although sizes were planned:
    another program took the memory meanwhile.
    """
    try:
        yield
    except OutOfMemory as error:
        raise OutOfMemory(f"{model}: {error}") from None
    except (MemoryError, OSError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(
            f"{model}: out of memory: the weights and the KV cache do not fit; lower kv_cache_bytes (npuMemSize), or "
            f"host_cache_bytes (cpuMemSize) where it is given ({error})"
        ) from error


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed: of Python, the kernels, the system or torch."""
    return isinstance(error, MemoryError) or bool(_NO_MEMORY.search(str(error)))


def trim_heap() -> None:
    """Return freed memory to the system where the C library can (glibc): loading leaves tens of MB."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
