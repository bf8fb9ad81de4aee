"""The key-value part of a GGUF file, read alone: quick, and without numpy or torch."""

import struct
from pathlib import Path
from typing import Any, BinaryIO

from kvloom.engine.errors import ModelError

FORMATS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}  # GGUF, value types
STRING, ARRAY = 8, 9


def read_metadata(path: Path) -> dict[str, Any]:
    """Every key of a little-endian GGUF file of version 2 or 3. Raises ModelError when it is none or is cut short."""
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelError(f"{path}: not a GGUF file")
            version = _number(file, "I")
            if version not in (2, 3):
                raise ModelError(f"{path}: GGUF version {version} is not known; 2 and 3 are")
            _number(file, "Q")  # how many tensors
            pairs = (_pair(file) for _ in range(_number(file, "Q")))
            return dict(pairs)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    except (struct.error, KeyError, UnicodeDecodeError, OverflowError, MemoryError) as error:
        raise ModelError(f"{path}: damaged or cut short: {error}") from None


def _pair(file: BinaryIO) -> tuple[str, Any]:
    key = _text(file)
    return key, _value(file, _number(file, "I"))


def _number(file: BinaryIO, form: str) -> Any:
    return struct.unpack("<" + form, file.read(struct.calcsize(form)))[0]


def _text(file: BinaryIO) -> str:
    size = _number(file, "Q")
    data = file.read(size)
    if len(data) < size:
        raise struct.error("a string ends early")
    return data.decode()


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == STRING:
        return _text(file)
    if kind != ARRAY:
        return _number(file, FORMATS[kind])
    item, count = _number(file, "I"), _number(file, "Q")
    if item in FORMATS:
        form = f"<{count}{FORMATS[item]}"
        return list(struct.unpack(form, file.read(struct.calcsize(form))))
    return [_value(file, item) for _ in range(count)]
