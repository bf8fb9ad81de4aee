"""Descriptors: clients and models never get the last ones, with which the daemon reads memory and starts processes."""

import os
import resource

_NUM_SPARE = 24  # a process that is started takes about eight, a look at memory three


def is_spare(fd: int) -> bool:
    """Whether this descriptor is one of the last. The system always gives the lowest free number."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return fd >= limit - min(_NUM_SPARE, limit // 4)


def has_free() -> bool:
    """Whether the next descriptor is none of the last."""
    try:
        fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    os.close(fd)
    return not is_spare(fd)
