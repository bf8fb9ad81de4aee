"""Logging: the documented levels, two rotating files, and the request's id in every line."""

import contextlib
import errno
import logging
import os
import stat
import sys
from contextvars import ContextVar
from dataclasses import dataclass
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

from kvloom.contract.errors import BadRequest

PYTHON_LEVELS = ("FATAL", "ERROR", "WARNING", "INFO", "DEBUG")  # of MIES_PYTHON_LOG_LEVEL, spec A.1
LEVELS = {  # and those of spec table 2-2
    "Verbose": logging.DEBUG,
    "Info": logging.INFO,
    "Warning": logging.WARNING,
    "Error": logging.ERROR,
    "None": logging.CRITICAL + 10,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
    "FATAL": logging.CRITICAL,
}
FORMAT = "%(asctime)s %(levelname)s [%(request_id)s] %(name)s: %(message)s"

current_request_id: ContextVar[str] = ContextVar("request_id", default="-")


@dataclass(frozen=True, slots=True)
class PythonLog:
    """The second log of spec A.1: the same lines at a level of its own.

    `path` None: no file; otherwise the process id is added to the name.
    """

    level: str = "INFO"
    path: Path | None = None
    is_on_stdout: bool = False


@dataclass(frozen=True, slots=True)
class LogConfig:
    """`path` None: no file. Lines also go to standard error when `is_on_console`.

    Raises BadRequest for a `level` that is not in LEVELS.
    """

    level: str = "Warning"
    path: Path | None = None
    is_on_console: bool = True
    python: PythonLog = PythonLog()
    max_bytes: int = 20 * 2**20  # size of a file before the next one begins
    num_old: int = 9  # older files that are kept

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise BadRequest("logLevel", f"must be Verbose, Info, Warning, Error or None, got {self.level!r}")


class _RequestId(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = current_request_id.get()
        return True


def start_logging(config: LogConfig) -> None:
    """Replaces the root logger's handlers. Raises BadRequest when a file cannot be written."""
    server, python = LEVELS[config.level], LEVELS[config.python.level]
    handlers: list[tuple[int, logging.Handler]] = []
    if config.is_on_console:
        handlers.append((server, logging.StreamHandler(sys.stderr)))
    if config.path is not None and config.level != "None":
        handlers.append((server, _file("logPath", config.path, config)))
    if config.python.path is not None:
        path = config.python.path.with_name(f"{config.python.path.name}.{os.getpid()}")
        handlers.append((python, _file("MIES_PYTHON_LOG_PATH", path, config)))
    if config.python.is_on_stdout:
        handlers.append((python, logging.StreamHandler(sys.stdout)))
    for level, handler in handlers:
        handler.setLevel(level)
        handler.addFilter(_RequestId())
        handler.setFormatter(logging.Formatter(FORMAT))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    for _, handler in handlers or [(server, logging.NullHandler())]:
        root.addHandler(handler)
    root.setLevel(min((level for level, _ in handlers), default=server))
    for chatty in ("httpx", "asyncio", "uvicorn.error"):
        logging.getLogger(chatty).setLevel(max(root.level, logging.WARNING))


def _file(name: str, path: Path, config: LogConfig) -> RotatingFileHandler:
    """`name`: the setting that gave the path, for errors."""
    try:
        path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        return _PrivateFile(path, "a", config.max_bytes, config.num_old, "utf-8", errors="backslashreplace")
    except OSError as error:
        raise BadRequest(name, f"{path} cannot be written: {error.strerror}") from None


class _PrivateFile(RotatingFileHandler):
    """Files that the owner writes and the group may read. A file that others have moved or removed is made anew. Lines
    that a full disk, or pipe, refuses are lost, which is reported once.
    """

    _num_lost = 0
    _is_stuck = False  # the next file could not be begun
    _opened: os.stat_result

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding=self.encoding, errors=self.errors, opener=self._enter)

    def _enter(self, path: str, flags: int) -> int:
        descriptor = _private(path, flags)
        self._opened = os.fstat(descriptor)
        return descriptor

    def emit(self, record: logging.LogRecord) -> None:
        num_lost = self._num_lost
        if not self._is_there():
            self._leave()
        super().emit(record)
        if num_lost and num_lost == self._num_lost:
            self._num_lost = 0
            self._tell(f"is written again; {num_lost} lines were lost")

    def doRollover(self) -> None:
        """Begins the next file. Where that cannot be, this one grows, which is reported once."""
        try:
            if self.backupCount:
                super().doRollover()
            else:
                os.truncate(self.baseFilename, 0)
            self._is_stuck = False
        except OSError as error:
            if not self._is_stuck:
                self._tell(f"grows beyond its size, because no next file can be begun: {error.strerror}")
            self._is_stuck = True

    def _is_there(self) -> bool:
        """Whether the path still leads to the file that was opened."""
        try:
            return os.path.samestat(os.stat(self.baseFilename), self._opened)
        except OSError:
            return False

    def _leave(self) -> None:
        """Closes the file; the next line opens it anew."""
        stream, self.stream = self.stream, None
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        if not self._num_lost:
            self._tell(f"cannot be written: {error.strerror}")
        self._num_lost += 1

    def _tell(self, what: str) -> None:
        with contextlib.suppress(OSError):
            print(f"kvloom: {self.baseFilename} {what}", file=sys.stderr)


def _private(path: str, flags: int) -> int:
    """A pipe is never waited for: neither for its reader, without whom this raises OSError, nor for room in it."""
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK, 0o640)
    except OSError as error:
        why = "it is a pipe that nobody reads" if error.errno == errno.ENXIO else error.strerror
        raise OSError(error.errno, why, path) from None
    os.set_blocking(descriptor, not stat.S_ISFIFO(os.fstat(descriptor).st_mode))
    return descriptor
