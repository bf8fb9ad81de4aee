"""What a child process writes to standard error goes into its parent's log, with the child's name.

`begin` is called in the child: its log lines then carry level and logger. Anything else on standard error (a library's
warning, a traceback, a crash in a kernel) is logged as a warning of the child.
"""

import logging
import re
import sys
import threading
from typing import IO

_LINE = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) ([\w.]+): (.*)", re.DOTALL)
_OTHER = "kvloom.processes"
_MAX_LINE_BYTES = 1 << 16  # a longer line is logged in pieces


def begin(level: int) -> None:
    """In a child: log to standard error in the form that `relay` reads."""
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)


def level() -> int:
    """The lowest level that this process logs of a child."""
    return logging.getLogger(_OTHER).getEffectiveLevel()


class Relay(threading.Thread):
    """Logs the stream's lines, prefixed with `who` ("rank 0"), until the stream ends; then closes it."""

    def __init__(self, stream: IO[bytes], who: str) -> None:
        super().__init__(name=f"log of {who}", daemon=True)
        self.last_line = ""  # of those that say something
        self._stream, self._who = stream, who

    def run(self) -> None:
        """See the class."""
        with self._stream:
            for line in iter(lambda: self._stream.readline(_MAX_LINE_BYTES), b""):
                text = line.decode(errors="replace").rstrip()
                self.last_line = text.strip() or self.last_line
                tell(text, self._who)


def relay(stream: IO[bytes], who: str) -> Relay:
    """A Relay that runs."""
    started = Relay(stream, who)
    started.start()
    return started


def tell(line: str, who: str) -> None:
    """Log one line of a child at the level that it names."""
    found = _LINE.fullmatch(line)
    if found is not None:
        logging.getLogger(found[2]).log(logging.getLevelNamesMapping()[found[1]], "%s: %s", who, found[3])
    elif line:
        logging.getLogger(_OTHER).warning("%s: %s", who, line)
