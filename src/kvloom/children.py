"""Processes that are to end with the one that started them."""

import ctypes
import signal

_PR_SET_PDEATHSIG = 1
_prctl = getattr(ctypes.CDLL(None), "prctl", None)  # looked up here: little is safe between fork and exec


def end_with_parent() -> None:
    """As Popen's preexec_fn: the process gets SIGTERM when its parent ends, even by SIGKILL. Only Linux can do that."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
