"""Child processes that end with their parent."""

import ctypes
import signal

_PR_SET_PDEATHSIG = 1
_prctl = getattr(ctypes.CDLL(None), "prctl", None)  # looked up here: little is safe between fork and exec


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Send the calling child this signal when its parent ends, even by SIGKILL. For Popen's preexec_fn; Linux only."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, number)
