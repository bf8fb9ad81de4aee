"""Bodies: bytes -> a validated struct, every failure a BadRequest that names the field."""

import re
from typing import TypeVar

import msgspec

from kvloom.contract.errors import BadRequest
from kvloom.contract.json_numbers import decoded

T = TypeVar("T")
_AT = re.compile(r"^(?P<problem>.*?)(?: - at (?:`key` in )?`(?P<path>[^`]*)`)?$", re.DOTALL)


def decode_body(decoder: msgspec.json.Decoder[T], body: bytes | bytearray) -> T:
    """Raises BadRequest: not UTF-8, not JSON, nested too deeply, a field of the wrong type or out of range."""
    try:
        return decoded(decoder, body)
    except msgspec.ValidationError as error:
        found = _AT.match(str(error))
        path = (found["path"] or "") if found else ""
        problem = found["problem"] if found else str(error)
        missing = re.match(r"Object missing required field `(\w+)`", problem)
        if missing:
            raise BadRequest(".".join(filter(None, (_field(path), missing[1]))), "is required") from None
        raise BadRequest(_field(path), problem[:1].lower() + problem[1:]) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest("", f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise BadRequest("", "the body is nested too deeply") from None


def _field(path: str) -> str:
    """`$.messages[0].content` -> `messages[0].content`."""
    return path.removeprefix("$").removeprefix(".")
