"""The values of arguments that calls write without JSON, as JSON text of a type that the tool's schema allows."""

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

MAX_DEPTH = 16  # references and alternatives of a schema that are followed
_WORDS = {"None": "null", "True": "true", "False": "false"}
_PYTHON = re.compile(r'"(?:\\.|[^"\\])*"|\b(?:None|True|False)\b')
_BARE_KEY = re.compile(r'("(?:\\.|[^"\\])*")|([{,]\s*)([^\s"{}\[\],:]+)(\s*:)')


def typed_json(schema: Mapping[str, Any], key: str, value: str, said: str, is_bare: bool = False) -> str:
    """A parameter's value as JSON text: what is JSON of a type that the schema allows stays JSON, all else is a text
    where the schema allows one. `said`: "text" or "json" where the call itself says which. `is_bare`: keys of objects
    are written without quotes.
    """
    properties = schema.get("properties")
    return value_json(properties.get(key) if isinstance(properties, dict) else None, schema, value, said, is_bare)


def value_json(known: object, root: Mapping[str, Any], value: str, said: str = "", is_bare: bool = False) -> str:
    """The same of a value whose schema is `known`; `root` holds what references lead to."""
    is_text = said == "text" or (not said and isinstance(known, dict) and known.get("type") == "string")
    literal = None if is_text else _literal(value, is_bare)
    if literal is None:
        return json.dumps(value, ensure_ascii=False)
    types = types_of(known, root)
    if not said and types is not None and "string" in types and json_type(msgspec.json.decode(literal)) not in types:
        return json.dumps(value, ensure_ascii=False)
    return literal


def _literal(value: str, is_bare: bool) -> str | None:
    """The value as JSON text, also of what Python writes; None for what is neither."""
    words = _PYTHON.sub(lambda found: _WORDS.get(found[0], found[0]), value.strip())
    if is_bare:
        words = _BARE_KEY.sub(lambda found: found[1] or f'{found[2]}"{found[3]}"{found[4]}', words)
    for text in (value.strip(), words):
        try:
            msgspec.json.decode(text)
        except (ValueError, RecursionError):  # no JSON; also half a surrogate pair, or a number that no float can hold
            continue
        return text
    try:
        found = ast.literal_eval(value.strip()) if value.strip()[:1] in ("{", "[") else None
        if found is None:
            return None
        text = json.dumps(found, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
    return text


class Brackets:
    """Those of a value that grows, of JSON or Python's: what stands in strings is none."""

    def __init__(self) -> None:
        self._num_read = self._depth = 0
        self._quote = ""  # of the string that is open
        self._is_escaped = False

    def are_open(self, value: str) -> bool:
        """Whether one of them is not closed at the value's end. The value begins with all that was given before."""
        for char in value[self._num_read :]:
            if self._is_escaped:
                self._is_escaped = False
            elif self._quote:
                self._is_escaped = char == "\\"
                self._quote = "" if char == self._quote else self._quote
            elif char in "\"'":
                self._quote = char
            else:
                self._depth += (char in "([{") - (char in ")]}")
        self._num_read = len(value)
        return self._depth > 0 or bool(self._quote)


def json_of_quoted(quote: str, text: str) -> str:
    """A string between Python's quotes as JSON text; what is no escape stays as it is."""
    if quote == '"':
        try:
            msgspec.json.decode(f'"{text}"')
        except ValueError:
            pass  # no string of JSON, but maybe of Python
        else:
            return f'"{text}"'
    inner = re.sub(
        r"\\.|\n|" + quote,
        lambda found: {"\n": r"\n", quote: "\\" + quote}.get(found[0], found[0]),
        text,
        flags=re.DOTALL,
    )
    try:
        value = ast.literal_eval(f"{quote}{inner}{quote}")
        value.encode()
    except (ValueError, SyntaxError):
        value = text
    return json.dumps(value, ensure_ascii=False)


def json_type(value: object) -> str:
    """The type's name in JSON Schema; "number" also for whole numbers."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


Types = frozenset[str] | None


def types_of(schema: object, root: Mapping[str, Any]) -> Types:
    """The JSON types that a schema allows, named as json_type does; None where its outermost keywords do not say.

    `root` holds what references lead to; each is followed once, so the work is bounded by the schema's text.
    """
    return _types_of(schema, root, MAX_DEPTH, {})


def _types_of(schema: object, root: Mapping[str, Any], depth: int, found_at: dict[str, Types]) -> Types:
    if not isinstance(schema, dict) or not depth:
        return None
    given = schema.get("type")
    if given is not None:
        names = [given] if isinstance(given, str) else given
        return frozenset("number" if name == "integer" else str(name) for name in names if isinstance(name, str))
    if "const" in schema or isinstance(schema.get("enum"), list):
        return frozenset(map(json_type, schema.get("enum", [schema.get("const")])))
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        if reference not in found_at:
            found_at[reference] = None  # within itself it says nothing
            found_at[reference] = _types_of(at_reference(root, reference), root, depth - 1, found_at)
        return found_at[reference]
    every = schema.get("allOf")
    options = next((schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)), None)
    options = every if options is None and isinstance(every, list) and len(every) == 1 else options
    if options is None:
        return None
    found = [_types_of(option, root, depth - 1, found_at) for option in options]
    return frozenset().union(*(types for types in found if types)) if all(found) else None


def at_reference(root: Mapping[str, Any], reference: str) -> object:
    """What a reference within the schema leads to; None where there is nothing."""
    place: object = root
    for name in reference.removeprefix("#/").split("/"):
        place = place.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
    return place
