"""What signals mean to a process that another one has started and ends by closing its socket."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

_THE_PARENTS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def signals_held_at_start() -> Iterator[None]:
    """Processes that are started within hold the parent's signals back until `leave_signals_to_the_parent`.

    Else one that still imports ends by them, and prints where. In this thread they wait as long.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _THE_PARENTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_signals_to_the_parent() -> None:
    """Ctrl-C and a service manager's SIGTERM reach all processes of a group; whoever started this one decides."""
    for number in _THE_PARENTS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _THE_PARENTS)  # what this one starts is not to hold them for ever
