"""Reads files that came with a model, carefully, because they may be wrong or hostile."""

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from kvloom.contract.errors import ModelError

MAX_CONFIG_BYTES = 4 << 20
_MAX_BYTES = 64 << 20  # the largest index of a sharded checkpoint has about 10 MiB


def open_file(path: Path) -> BinaryIO:
    """Raises ModelError when the path cannot be opened or is not a plain file: opening a pipe would wait."""
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ModelError(f"{path}: is no plain file")
    return file


def read_text(path: Path, max_bytes: int = _MAX_BYTES) -> str:
    """The text of a plain file, without a byte order mark. Raises ModelError."""
    try:
        with open_file(path) as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(data) > max_bytes:
        raise ModelError(f"{path}: is longer than {max_bytes >> 20} MiB")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: cannot be read as UTF-8: {error}") from None


def read_json(path: Path, max_bytes: int = _MAX_BYTES) -> Any:
    """Any JSON value. Raises ModelError."""
    try:
        return json.loads(read_text(path, max_bytes))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from None


def read_object(path: Path, max_bytes: int = _MAX_BYTES) -> dict[str, Any]:
    """A JSON object. Raises ModelError when the file is absent or contains something else."""
    value = read_json(path, max_bytes)
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds no JSON object")
    return value
