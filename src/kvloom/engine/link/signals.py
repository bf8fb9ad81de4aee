"""What signals mean to a process that another one has started and ends by closing its socket."""

import signal


def leave_signals_to_the_parent() -> None:
    """Ctrl-C and a service manager's SIGTERM reach all processes of a group; whoever started this one decides."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
