"""Standard streams of programs that are started without some of them (`2>&-`, as by some supervisors), or in a locale
that lacks characters.
"""

import io
import os
import sys

_WHOLE = ("surrogateescape", "utf-8")  # writes every character, and each byte of a path as it is


def open_standard_streams() -> None:
    """Open closed standard streams to /dev/null: otherwise the next socket would get their number, and their output."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", errors="backslashreplace", closefd=False)
    if isinstance(sys.stdout, io.TextIOWrapper) and (sys.stdout.errors, sys.stdout.encoding) != _WHOLE:
        sys.stdout.reconfigure(errors="backslashreplace")  # what it cannot write would end the program
