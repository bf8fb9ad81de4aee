"""Signals in a child process that its parent ends by closing its socket."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

_THE_PARENTS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def signals_held_at_start() -> Iterator[None]:
    """Processes started inside this context have the parent's signals blocked until `leave_signals_to_the_parent`.

    Otherwise a signal during a child's imports would end it with a traceback. In this thread the signals are blocked
    too.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _THE_PARENTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_signals_to_the_parent() -> None:
    """Ignore Ctrl-C and SIGTERM, which reach the whole process group: the parent decides when this process ends."""
    for number in _THE_PARENTS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _THE_PARENTS)  # child processes would inherit a block
