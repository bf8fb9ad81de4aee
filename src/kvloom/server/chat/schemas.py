"""JSON schemas before llguidance reads them: without what restricts nothing, and without what it would answer wrongly.

A `format` that it does not know is a note to it (JSON Schema 2020-12, validation, 7.2.1). Pure.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvloom.contract.errors import BadRequest
from kvloom.server.serving.notes import note

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_ONES = ("items", "additionalProperties", "additionalItems", "not", "contains", "propertyNames", "if", "then", "else")
_MAX_EXACT = 2**53  # llguidance computes with float64
_MAX_DIGITS = 15  # which every float64 gives back
_OF_ANY_INTEGER = 2**63 - 1  # bounds at or beyond it, as generators write for their integer types


def plain_schema(schema: Any, field: str) -> Any:
    """The schema without keys that restrict nothing. Raises BadRequest for a number that would be answered as another
    one.
    """
    if not isinstance(schema, dict):
        return schema
    found = {key: value for key, value in schema.items() if not _restricts_nothing(key, value)}
    for value in _constants(found):
        _check_exact(value, field)
    found = _mapped(found, lambda inner: plain_schema(inner, field))
    return _without_impossible(found)


def without_patterns(schema: Any, holds: Callable[[str], bool]) -> Any:
    """The schema without the patterns that cannot be held, which a note tells."""
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    if isinstance(found.get("pattern"), str) and not holds(found["pattern"]):
        note(f"pattern {found.pop('pattern')!r} of the schema is not held")
    named = found.get("patternProperties")
    if isinstance(named, dict) and (lost := [name for name in named if not holds(name)]):
        note(f"patternProperties {lost[0]!r} of the schema is not held")
        found["patternProperties"] = {name: each for name, each in named.items() if name not in lost}
    return _mapped(found, lambda inner: without_patterns(inner, holds))


def _mapped(schema: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """The schema with `change` applied to each schema right below it."""
    found = dict(schema)
    for key in _MAPS:
        if isinstance(found.get(key), dict):
            found[key] = {name: change(each) for name, each in found[key].items()}
    for key in _LISTS:
        if isinstance(found.get(key), list):
            found[key] = [change(each) for each in found[key]]
    for key in _ONES:
        if isinstance(found.get(key), dict):
            found[key] = change(found[key])
    return found


def _restricts_nothing(key: str, value: Any) -> bool:
    if key == "propertyNames":
        return value is True or (isinstance(value, dict) and value in ({}, {"type": "string"}))
    if key in ("minimum", "exclusiveMinimum"):
        return _is_number(value) and value <= -_OF_ANY_INTEGER
    if key in ("maximum", "exclusiveMaximum"):
        return _is_number(value) and value >= _OF_ANY_INTEGER
    return False


def _without_impossible(schema: dict[str, Any]) -> dict[str, Any]:
    """Properties that nothing satisfies in the form that llguidance knows."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return schema
    return schema | {"properties": {name: False if each == {"not": {}} else each for name, each in properties.items()}}


def _constants(schema: Mapping[str, Any]) -> Iterator[Any]:
    if "const" in schema:
        yield schema["const"]
    if isinstance(schema.get("enum"), list):
        yield from schema["enum"]


def _check_exact(value: Any, field: str) -> None:
    """Raises BadRequest for a number, however deep in the value, with more digits than a float64 keeps."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            _check_exact(each, field)
    elif _is_number(value) and not _is_exact(value):
        raise BadRequest(
            field, f"holds the constant {value!r}, which has too many digits to be answered; give it as text"
        )


def _is_exact(value: float) -> bool:
    if isinstance(value, int):
        return abs(value) <= _MAX_EXACT
    return float(f"{value:.{_MAX_DIGITS}g}") == value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
