"""Logging: the seed's levels, a rotating file, the request's id in every line."""

import logging
import os
import sys
from contextvars import ContextVar
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path

from kvloom.engine.errors import BadRequest

# seed 001, table 2-2, and the names of A.1's MIES_PYTHON_LOG_LEVEL
LEVELS = {
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
MAX_FILE_BYTES = 20 * 2**20
NUM_OLD_FILES = 9
FORMAT = "%(asctime)s %(levelname)s [%(request_id)s] %(name)s: %(message)s"

current_request_id: ContextVar[str] = ContextVar("request_id", default="-")


@dataclass(frozen=True, slots=True)
class LogConfig:
    """`level` is one of LEVELS. `path` None: no file. Lines also go to standard error when `is_on_console`."""

    level: str = "Warning"
    path: Path | None = None
    is_on_console: bool = True


class _RequestId(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = current_request_id.get()
        return True


def start_logging(config: LogConfig) -> None:
    """Replaces the root logger's handlers. Raises BadRequest when the file cannot be written."""
    handlers: list[logging.Handler] = []
    if config.is_on_console:
        handlers.append(logging.StreamHandler(sys.stderr))
    if config.path is not None and config.level != "None":
        handlers.append(_file(config.path))
    for handler in handlers:
        handler.addFilter(_RequestId())
        handler.setFormatter(logging.Formatter(FORMAT))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    for handler in handlers or [logging.NullHandler()]:
        root.addHandler(handler)
    root.setLevel(LEVELS[config.level])
    for chatty in ("httpx", "asyncio", "uvicorn.error"):
        logging.getLogger(chatty).setLevel(max(LEVELS[config.level], logging.WARNING))


def _file(path: Path) -> RotatingFileHandler:
    try:
        path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        return _PrivateFile(path, maxBytes=MAX_FILE_BYTES, backupCount=NUM_OLD_FILES, encoding="utf-8")
    except OSError as error:
        raise BadRequest("logPath", f"{path} cannot be written: {error.strerror}") from None


class _PrivateFile(RotatingFileHandler):
    """Files that only the owner writes and the group may read."""

    def _open(self):  # type: ignore[no-untyped-def]
        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=_private)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o640)
