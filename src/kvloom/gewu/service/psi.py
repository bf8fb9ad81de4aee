"""Triggers on the kernel's pressure file: the daemon learns of a stall at once, not at its next tick.

Where triggers are not permitted, or the file is not a pressure file (tests), the counters read at every tick suffice. A
thread of its own waits for them, because asyncio has no priority events, and an epoll inside another one loses them.
"""

import contextlib
import os
import select
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from kvloom.gewu.service.memory import FULL_STALL_US, PSI_WINDOW_S, SOME_STALL_US

_STALLS = {1: ("some", SOME_STALL_US), 2: ("full", FULL_STALL_US)}  # level of the ladder -> trigger
_WINDOW_US = int(PSI_WINDOW_S * 1e6)  # unprivileged triggers need a multiple of 2 s


def open_triggers(psi_file: Path) -> dict[int, int]:
    """{descriptor with a trigger: its level}, empty where triggers are not available. The caller closes them."""
    found = {}
    for level, (kind, stall_us) in _STALLS.items():
        with contextlib.suppress(OSError):  # no such file, no PSI in this kernel, no permission
            fd = os.open(psi_file, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                _refuse_plain_file(fd)
                os.write(fd, f"{kind} {stall_us} {_WINDOW_US}\0".encode())
            except OSError:
                os.close(fd)
            else:
                found[fd] = level
    return found


def _refuse_plain_file(fd: int) -> None:
    """Raises OSError for a file without events, which writing a trigger would overwrite."""
    with select.epoll() as epoll:
        epoll.register(fd, 0)


class Watcher:
    """Calls `on_fired` with a level, on a thread of its own, when a descriptor has a priority event. Owns the
    descriptors.
    """

    def __init__(self, level_of: Mapping[int, int], on_fired: Callable[[int], object]) -> None:
        self._level_of = dict(level_of)
        self._on_fired = on_fired
        self._stop_fd, self._own_fd = os.pipe()
        self._thread = threading.Thread(target=self._run, name="psi", daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.close(self._own_fd)
        self._thread.join()
        for fd in (self._stop_fd, *self._level_of):
            os.close(fd)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._stop_fd, 0)  # a hang-up is reported in any case
        for fd in self._level_of:
            poll.register(fd, select.POLLPRI)
        while True:
            for fd, event in poll.poll():
                if fd == self._stop_fd:
                    return
                if event & select.POLLERR:  # the trigger is gone
                    poll.unregister(fd)
                else:
                    self._on_fired(self._level_of[fd])
