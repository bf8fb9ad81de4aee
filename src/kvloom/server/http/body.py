"""Bodies: bytes -> a validated struct, every failure a BadRequest that names the field."""

import re
from codecs import BOM_UTF8
from typing import Any, TypeVar

import msgspec

from kvloom.contract import json_numbers
from kvloom.contract.errors import BadRequest

T = TypeVar("T")
_AT = re.compile(r"^(?P<problem>.*?)(?: - at (?:`key` in )?`(?P<path>[^`]*)`)?$", re.DOTALL)


def decode_body(decoder: msgspec.json.Decoder[T], body: bytes | bytearray) -> T:
    """Raises BadRequest: not UTF-8, not JSON, nested too deeply, a field of the wrong type or out of range."""
    if body.startswith(BOM_UTF8):
        body = body[len(BOM_UTF8) :]
    try:
        return json_numbers.decoded(decoder, body)
    except msgspec.ValidationError as error:
        raise _wrong(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest("", f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise BadRequest("", "the body is nested too deeply") from None


def converted(value: Any, kind: type[T], field: str) -> T:
    """A part of a body whose type shows only when another part of it is known. Raises BadRequest."""
    try:
        return json_numbers.converted(value, kind)
    except msgspec.ValidationError as error:
        wrong = _wrong(error)
        raise BadRequest(f"{field}{'' if wrong.field[:1] in ('', '[') else '.'}{wrong.field}", wrong.problem) from None


def _wrong(error: msgspec.ValidationError) -> BadRequest:
    found = _AT.match(str(error))
    path = (found["path"] or "") if found else ""
    problem = found["problem"] if found else str(error)
    missing = re.match(r"Object missing required field `(\w+)`", problem)
    if missing:
        return BadRequest(".".join(filter(None, (_field(path), missing[1]))), "is required")
    return BadRequest(_field(path), problem[:1].lower() + problem[1:])


def _field(path: str) -> str:
    """`$.messages[0].content` -> `messages[0].content`."""
    return path.removeprefix("$").removeprefix(".")
