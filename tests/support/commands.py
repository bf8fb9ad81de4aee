"""Short-lived commands, run in this process: their output and exit code."""

import contextlib
import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

from kvloom.cli import main


@dataclass(frozen=True, slots=True)
class Ended:
    returncode: int
    stdout: str
    stderr: str


def run_cli(*arguments: str) -> Ended:
    """Runs `kvloom` with these arguments."""
    return run_main(main, *arguments)


def run_main(main: Callable[[], None], *arguments: str) -> Ended:
    """Runs a command through its entry point `main`."""
    out, errors, code = io.StringIO(), io.StringIO(), 0
    patched = mock.patch.object(sys, "argv", ["command", *arguments])
    with patched, contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
    return Ended(code, out.getvalue(), errors.getvalue())
