"""Writes files that only their owner may read, without ever leaving part of one."""

import os
import tempfile
from pathlib import Path


def write_private(path: Path, data: bytes) -> None:
    """Replace `path` atomically by a file with mode 0600; a crash leaves the old one intact. Raises OSError.

    Missing folders are made, with mode 0700. A symbolic link stays, and the file that it names is replaced. What is no
    file (/dev/stdout, /dev/null, a pipe that somebody reads) is written to: replaced, a device would be gone for every
    program.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        with open(path, "wb", opener=_without_waiting) as device:
            os.set_blocking(device.fileno(), True)
            device.write(data)
        return
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mkstemp's mode is 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
