"""Standard streams for programs that are started without some of them (`2>&-`, as some supervisors do)."""

import os
import sys


def open_standard_streams() -> None:
    """Those that are closed lead to /dev/null: else the next socket takes their number, and what is written to it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", errors="backslashreplace", closefd=False)
