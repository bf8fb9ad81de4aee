"""MessagePack for messages: an array of integers, booleans, texts, bytes and lists of integers. Pure.

Own code, so that the SDK needs no library for it. Integers take the fewest bytes, as with other encoders; those of a
list that take the same number are written and read together, as most offsets and lengths do.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import TypeAlias

Value: TypeAlias = "int | bool | str | bytes | list[int]"
Reader: TypeAlias = "Callable[[bytes, int], tuple[Value, int]]"

_WIDTHS = (  # first byte, format, and smallest and largest number in that form
    (0xCC, "B", 0, 0xFF),
    (0xCD, "H", 0, 0xFFFF),
    (0xCE, "I", 0, 0xFFFF_FFFF),
    (0xCF, "Q", 0, 0xFFFF_FFFF_FFFF_FFFF),
    (0xD0, "b", -0x80, 0x7F),
    (0xD1, "h", -0x8000, 0x7FFF),
    (0xD2, "i", -0x8000_0000, 0x7FFF_FFFF),
    (0xD3, "q", -0x8000_0000_0000_0000, 0x7FFF_FFFF_FFFF_FFFF),
)
_FORMATS = {first: form for first, form, _least, _greatest in _WIDTHS}
_GREATEST = {form: greatest for _first, form, _least, greatest in _WIDTHS}
_PACKED = {form: f">B{form}" for form in _FORMATS.values()}
_BYTES, _TEXT, _LIST = {0xC4: "B", 0xC5: "H", 0xC6: "I"}, {0xD9: "B", 0xDA: "H", 0xDB: "I"}, {0xDC: "H", 0xDD: "I"}
_SHORT_TEXT, _SHORT_LIST = 0xA0, 0x90  # with the length in the same byte
_MAX_SHORT_TEXT, _MAX_SHORT_LIST = 31, 15


@lru_cache(1 << 10)
def _struct(form: str, count: int) -> struct.Struct:
    """`count` numbers, each behind its first byte."""
    return struct.Struct(">" + f"x{form}" * count)


def _width(value: int) -> tuple[int, str]:
    """First byte and format of a number; no format: the number is its own byte. Raises ValueError beyond 64 bits."""
    if -32 <= value < 0x80:
        return value & 0xFF, ""
    for first, form, least, greatest in _WIDTHS:
        if least <= value <= greatest:
            return first, form
    raise ValueError(f"{value} does not fit into 64 bits")


@lru_cache(1 << 14)  # offsets and lengths recur
def _pack_int(value: int) -> bytes:
    first, form = _width(value)
    return struct.pack(_PACKED[form], first, value) if form else bytes((first,))


def _pack_ints(values: list[int]) -> bytes:
    count = len(values)
    head = bytes((_SHORT_LIST | count,)) if count <= _MAX_SHORT_LIST else _pack_head(count, _LIST)
    if count and values.count(values[0]) == count:  # as lengths are
        return head + _pack_int(values[0]) * count
    first, form = _width(min(values, default=0))
    if not form.isupper():
        return head + b"".join(map(_pack_int, values))
    numbers = _struct(form, count)
    try:
        data = bytearray(numbers.pack(*values))
    except struct.error:  # some take more bytes than the minimum
        return head + b"".join(map(_pack_int, values))
    data[:: numbers.size // count] = bytes((first,)) * count
    return head + data


def _pack_head(count: int, heads: dict[int, str]) -> bytes:
    """Header of so many bytes or values."""
    for first, form in heads.items():
        if count <= _GREATEST[form]:
            return struct.pack(_PACKED[form], first, count)
    raise ValueError(f"{count} values or bytes are too many")


def _pack_text(value: str) -> bytes:
    data = value.encode()
    is_short = len(data) <= _MAX_SHORT_TEXT
    return (bytes((_SHORT_TEXT | len(data),)) if is_short else _pack_head(len(data), _TEXT)) + data


def _pack_value(value: Value) -> bytes:
    if isinstance(value, bytes):
        return _pack_head(len(value), _BYTES) + value
    if isinstance(value, list):
        return _pack_ints(value)
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    return _pack_int(value) if isinstance(value, int) else _pack_text(value)


def pack(values: Iterable[Value]) -> bytes:
    """An array of fewer than 16 values. Raises ValueError for a number beyond 64 bits."""
    parts = list(map(_pack_value, values))
    return bytes((_SHORT_LIST | len(parts),)) + b"".join(parts)


def unpack(data: bytes, readers: Sequence[Reader]) -> list[Value]:
    """The first values of an array, as many as there are `readers`, or as it has.

    Values behind them, of a newer version, are ignored. Raises ValueError for anything else, and for trailing bytes.
    """
    try:
        count, position = _read_head(data, 0, _SHORT_LIST, _MAX_SHORT_LIST, _LIST)
        values: list[Value] = []
        for read in readers[:count]:
            value, position = read(data, position)
            values.append(value)
        for _ in range(count - len(values)):
            _value, position = _read_any(data, position)
    except (IndexError, struct.error):
        raise ValueError("it ends too early") from None
    if position != len(data):
        raise ValueError(f"{len(data) - position} bytes behind its end")
    return values


def _read_head(data: bytes, position: int, short: int, max_short: int, heads: dict[int, str]) -> tuple[int, int]:
    """A length, and where what it counts begins. short: the byte of length 0 if `max_short` fits into it, or 0."""
    first = data[position]
    if max_short and short <= first <= short + max_short:
        return first - short, position + 1
    if first not in heads:
        raise ValueError(f"unexpected {first:#x}")
    number = _struct(heads[first], 1)
    (count,) = number.unpack_from(data, position)
    return count, position + number.size


def _read_bool(data: bytes, position: int) -> tuple[bool, int]:
    if data[position] not in (0xC2, 0xC3):
        raise ValueError(f"expected a boolean, got {data[position]:#x}")
    return data[position] == 0xC3, position + 1


def _read_bytes(data: bytes, position: int) -> tuple[bytes, int]:
    size, start = _read_head(data, position, 0, 0, _BYTES)
    if size > len(data) - start:
        raise IndexError
    return data[start : start + size], start + size


def _read_text(data: bytes, position: int) -> tuple[str, int]:
    size, start = _read_head(data, position, _SHORT_TEXT, _MAX_SHORT_TEXT, _TEXT)
    if size > len(data) - start:
        raise IndexError
    return data[start : start + size].decode(), start + size


def _read_int(data: bytes, position: int) -> tuple[int, int]:
    first = data[position]
    if first < 0x80:
        return first, position + 1
    if first >= 0xE0:
        return first - 0x100, position + 1
    if first not in _FORMATS:
        raise ValueError(f"expected an integer, got {first:#x}")
    number = _struct(_FORMATS[first], 1)
    (value,) = number.unpack_from(data, position)
    return value, position + number.size


def _read_ints(data: bytes, position: int) -> tuple[list[int], int]:
    count, position = _read_head(data, position, _SHORT_LIST, _MAX_SHORT_LIST, _LIST)
    values: list[int] = []
    while (left := count - len(values)) > 0:
        first = data[position]
        if first in _FORMATS:
            size = _struct(_FORMATS[first], 1).size
            firsts = data[position : position + left * size : size]
            alike = len(firsts) - len(firsts.lstrip(firsts[:1]))
            values += _struct(_FORMATS[first], alike).unpack_from(data, position)
            position += alike * size
        elif (some := data[position : position + left]).isascii():
            values += some
            position += len(some)
        else:
            value, position = _read_int(data, position)
            values.append(value)
    return values, position


READERS: dict[object, Reader] = {
    int: _read_int,
    bool: _read_bool,
    bytes: _read_bytes,
    str: _read_text,
    list[int]: _read_ints,
}
"""By the type of a field."""


def _read_any(data: bytes, position: int) -> tuple[Value, int]:
    for read in READERS.values():
        try:
            return read(data, position)
        except ValueError:
            continue
    raise ValueError(f"unexpected {data[position]:#x}")
