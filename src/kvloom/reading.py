"""Reads files that a user names, without waiting for ever."""

import errno
import io
import os
import stat
from pathlib import Path
from typing import BinaryIO

MAX_BYTES = 256 << 20


def read_bytes(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """The contents of `path`; of a pipe, like `<(command)`, everything that is written to it.

    Raises OSError, with the path, also for endless input: more than `max_bytes`, or a pipe without a writer.
    """
    with _opened(path) as file:
        data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise OSError(errno.EFBIG, f"it is larger than {max_bytes} bytes", str(path))
        if not data and _is_pipe(file):
            raise OSError(errno.EPIPE, "it is a pipe to which nobody writes", str(path))
    return data


def read_text(path: Path, max_bytes: int = MAX_BYTES) -> str:
    """The same as UTF-8, whatever the locale. Raises OSError, UnicodeDecodeError."""
    return read_bytes(path, max_bytes).decode("utf-8-sig")


def open_file(path: Path) -> BinaryIO:
    """Open a file of any size for reading; a pipe or a device, which may be endless, is read by read_bytes first.

    Raises the same errors.
    """
    file = _opened(path)
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    with file:
        return io.BytesIO(read_bytes(path))


def _opened(path: Path) -> BinaryIO:
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115, whoever calls closes it
    os.set_blocking(file.fileno(), True)
    return file


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _is_pipe(file: BinaryIO) -> bool:
    return stat.S_ISFIFO(os.fstat(file.fileno()).st_mode)
