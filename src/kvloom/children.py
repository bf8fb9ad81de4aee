"""Processes that are to end with the one that started them."""

import ctypes
import signal

_PR_SET_PDEATHSIG = 1
_prctl = getattr(ctypes.CDLL(None), "prctl", None)  # looked up here: little is safe between fork and exec


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """In the child, as Popen's preexec_fn: it gets the signal when its parent ends, even by SIGKILL. Only Linux can."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, number)
