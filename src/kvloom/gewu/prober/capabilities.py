"""Files opened on behalf of an app: a privileged service drops the capabilities that the app lacks."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

from kvloom.gewu.codes import Code, Refused

_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3: two words of 32 capabilities
_libc = ctypes.CDLL(None, use_errno=True)


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Word(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


@contextmanager
def only_those_of(pid: int) -> Iterator[None]:
    """A context with only the capabilities of process `pid`. Does nothing unless root: others run as the app's user
    anyway.

    Raises Refused when the app is gone.
    """
    if os.geteuid() != 0:
        yield
        return
    theirs = _effective_of(pid)
    words = (_Word * 2)()
    _call(_libc.capget, words)
    before = [word.effective for word in words]
    for i, word in enumerate(words):
        word.effective &= theirs >> (32 * i)
    _call(_libc.capset, words)
    try:
        yield
    finally:
        for word, effective in zip(words, before, strict=True):
            word.effective = effective
        _call(_libc.capset, words)


def _effective_of(pid: int) -> int:
    """The process's effective capabilities as a bit mask."""
    try:
        with open(f"/proc/{pid}/status") as file:
            lines = dict(line.split(":", 1) for line in file.read().splitlines() if ":" in line)
    except OSError:
        raise Refused(Code.NOPERM, f"there is no process {pid} to open files for") from None
    return int(lines["CapEff"], 16)


def _call(function: "ctypes._NamedFuncPointer", words: "ctypes.Array[_Word]") -> None:
    """Call capget or capset for this thread. Raises OSError."""
    if function(ctypes.byref(_Header(_VERSION, 0)), words) != 0:
        raise OSError(ctypes.get_errno(), "capabilities")
