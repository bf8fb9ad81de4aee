"""JSON has one kind of number: where an integer is wanted 4.0 and 4e0 are one, 4.5 and "4" are not. Pure.

Programs that keep all numbers as doubles write them so. msgspec refuses them; what it refuses is looked at once more
here, so that ordinary bodies are read at its speed.
"""

import re
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
_REFUSED = re.compile(r"Expected `(?P<kinds>[^`]*)`, got `float`(?: - at `(?P<path>[^`]*)`)?\Z")
_STEP = re.compile(r"\[(?P<index>\d+|\.\.\.)\]|\.(?P<name>[^.\[]+)")
_MOST_PLACES = 64  # fields of one body, or lists of numbers, that are written so


def decoded(decoder: msgspec.json.Decoder[T], data: bytes | bytearray) -> T:
    """What the decoder makes of the data. Raises what the decoder raises."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        if not _is_of_an_integer(error):
            raise
        return _converted(msgspec.json.decode(data), decoder.type, error)


def converted(value: Any, kind: type[T]) -> T:
    """As msgspec.convert, which raises ValidationError. `value` may be changed."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        return _converted(value, kind, error)


def as_whole(value: Any) -> Any:
    """A number without a fraction as an int; everything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _converted(value: Any, kind: type[T], error: msgspec.ValidationError) -> T:
    """`error`: of the value as it is."""
    for _ in range(_MOST_PLACES):
        found = _REFUSED.match(str(error))
        if found is None or not _is_of_an_integer(error) or not _mend(value, _STEP.findall(found["path"] or "")):
            break
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as next_error:
            error = next_error
    raise error


def _is_of_an_integer(error: msgspec.ValidationError) -> bool:
    found = _REFUSED.match(str(error))
    return found is not None and "int" in found["kinds"].split(" | ")


def _mend(value: Any, path: list[tuple[str, str]]) -> bool:
    """Make whole numbers of the floats at the path, with their neighbours in a list. Returns whether there were any."""
    if not path:
        return False
    (index, name), rest = path[0], path[1:]
    if rest:
        inner = _at(value, index, name)
        return any([_mend(each, rest) for each in inner])
    keys: Any = range(len(value)) if isinstance(value, list) else list(value) if index else [name]
    has_changed = False
    for key in keys:
        whole = as_whole(value[key])
        has_changed |= whole is not value[key]
        value[key] = whole
    return has_changed


def _at(value: Any, index: str, name: str) -> list[Any]:
    """The values that one step of a path leads to: `[...]` stands for any of an object's."""
    if index == "...":
        return [
            each for each in (value.values() if isinstance(value, dict) else value) if isinstance(each, dict | list)
        ]
    return [value[int(index)] if index else value[name]]
