"""The parent's side of a child process that begins with `inside.begin` (inside.py)."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvloom.processes.inside import THE_PARENTS

_lock = threading.Lock()
_ends: list[int] = []  # of this process's pipe: to read from, to write to


def lifeline() -> int:
    """For a child's standard input: a pipe whose other end this process holds, and never writes to, until it ends.

    A child that has called `inside.begin` then ends with this process, whichever thread has started it. It works for
    all children of a process, and must not be closed.
    """
    with _lock:
        if not _ends:
            _ends.extend(os.pipe())
        return _ends[0]


def _after_fork() -> None:
    """A forked child has a pipe of its own: else the parent's children would outlive the parent with it."""
    global _lock
    _lock = threading.Lock()
    for end in _ends:
        os.close(end)
    _ends.clear()


os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def signals_held_at_start() -> Iterator[None]:
    """Processes started inside this context have the parent's signals blocked until `inside.begin`.

    Otherwise a signal during a child's imports would end it with a traceback. In this thread the signals are blocked
    too.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, THE_PARENTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
