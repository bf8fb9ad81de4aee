"""JSON from apps, of up to 16 MiB: only known fields are decoded, the rest is skipped. Pure."""

import re
from typing import Any, TypeVar

import msgspec

from kvloom.gewu.codes import Code, Refused

MAX_DEPTH = 64
MAX_CONTAINERS = 1 << 14  # arrays and objects; more messages than any context holds
_MAX_TOKENS = 1 << 18  # brackets and strings that are scanned
_MAX_VALUE_BYTES = 1 << 16  # bytes of a field that is not a text
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}]', re.DOTALL)
_Fields = TypeVar("_Fields")


def read_fields(data: bytes, fields: type[_Fields]) -> _Fields:
    """The fields of an object; those of type Raw are not decoded. Raises Refused (INVAL)."""
    _check_nesting(data)
    try:
        data.decode()
        return msgspec.json.decode(data, type=fields)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(Code.INVAL, f"not a JSON object of the right kind: {error}") from None


def read_value(name: str, raw: msgspec.Raw, kind: Any = Any) -> Any:
    """The value of a Raw field, None when absent. Raises Refused (INVAL), also when a field of unknown type is too
    long.
    """
    data = bytes(raw)
    if not data:
        return None
    if kind is Any and len(data) > _MAX_VALUE_BYTES:
        raise Refused(Code.INVAL, f"{name}: is longer than {_MAX_VALUE_BYTES >> 10} KiB")
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise Refused(Code.INVAL, f"{name}: {error}") from None


def _check_nesting(data: bytes) -> None:
    """Raises Refused for JSON that is nested too deeply or has too many arrays and objects."""
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return
    depth = num_containers = 0
    for count, token in enumerate(_TOKEN.finditer(data)):
        first = data[token.start()]
        if first in b"[{":
            num_containers += 1
            depth += 1
        elif first in b"]}":
            depth -= 1
        if depth > MAX_DEPTH:
            raise Refused(Code.INVAL, f"nested deeper than {MAX_DEPTH}")
        if num_containers > MAX_CONTAINERS or count > _MAX_TOKENS:
            raise Refused(Code.INVAL, f"holds more than {MAX_CONTAINERS} arrays and objects, or too many strings")
