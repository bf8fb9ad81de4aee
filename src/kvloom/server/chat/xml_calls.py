"""One tool call as Qwen3-Coder writes it: `<function=NAME><parameter=KEY>VALUE</parameter>...</function>`."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

FUNCTION, PARAMETER = "<function=", "<parameter="
_END_FUNCTION, _END_PARAMETER = "</function>", "</parameter>"
_MAX_DEPTH = 16  # references and alternatives of a schema that are followed


class XmlCallScanner:
    """As json_calls.CallScanner. Arguments are returned parameter by parameter, typed by the schema."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        """`schemas`: of the tools' parameters; an unknown tool's parameters are JSON if valid, else text."""
        self.name: str | None = None
        self.found_name: str | None = None  # set as soon as the call is certain
        self.raw = ""
        self.is_done = self.is_failed = False
        self._schemas = schemas
        self._held = ""
        self._num_given = 0

    def take(self, char: str) -> str:
        if self.name is None:
            self.raw += char
        self._held += char
        if self.name is None:
            return self._take_name()
        if self._held.startswith(PARAMETER):
            return self._take_parameter() if self._held.endswith(_END_PARAMETER) else ""
        self._held = self._held.lstrip()
        if self._held == _END_FUNCTION:
            self.is_done = True
            return "}" if self._num_given else "{}"
        if not PARAMETER.startswith(self._held) and not _END_FUNCTION.startswith(self._held):
            self.is_failed = True
        return ""

    def _take_name(self) -> str:
        text = self._held.lstrip()
        if not FUNCTION.startswith(text) and not text.startswith(FUNCTION):
            self.is_failed = True
        elif text.endswith(">"):
            name = text[len(FUNCTION) : -1].strip()
            self.is_failed = not name
            self.name, self._held = name or None, ""
        return ""

    def _take_parameter(self) -> str:
        body = self._held[len(PARAMETER) : -len(_END_PARAMETER)]
        key, is_named, value = body.partition(">")
        if not is_named:
            return ""  # the end mark is part of the key so far
        self._held = ""
        text = self._typed(key.strip(), _without_newlines(value))
        start = ", " if self._num_given else "{"
        self._num_given += 1
        return f"{start}{json.dumps(key.strip(), ensure_ascii=False)}: {text}"

    def _typed(self, key: str, value: str) -> str:
        """A parameter's value as JSON text: what is JSON of a type that the schema allows stays JSON, all else is a
        text where the schema allows one.
        """
        schema = self._schemas.get(self.name or "", {})
        properties = schema.get("properties")
        known = properties.get(key) if isinstance(properties, dict) else None
        is_text = isinstance(known, dict) and known.get("type") == "string"  # such are written without quotes
        try:
            found = _json_type(None if is_text else msgspec.json.decode(value))
        except (ValueError, RecursionError):  # no JSON; also half a surrogate pair, or a number that no float can hold
            is_text = True
        types = None if is_text else _types_of(known, schema)
        if is_text or (types is not None and found not in types and "string" in types):
            return json.dumps(value, ensure_ascii=False)
        return value.strip()


def _without_newlines(value: str) -> str:
    """The value without the newlines that the template puts around it."""
    return value.removeprefix("\n").removesuffix("\n")


def _json_type(value: object) -> str:
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


def _types_of(schema: object, root: Mapping[str, Any], depth: int = _MAX_DEPTH) -> frozenset[str] | None:
    """The JSON types that a schema allows, named as _json_type does; None where its outermost keywords do not say.

    `root` holds what references lead to.
    """
    if not isinstance(schema, dict) or not depth:
        return None
    given = schema.get("type")
    if given is not None:
        names = [given] if isinstance(given, str) else given
        return frozenset("number" if name == "integer" else str(name) for name in names if isinstance(name, str))
    if "const" in schema or isinstance(schema.get("enum"), list):
        return frozenset(map(_json_type, schema.get("enum", [schema.get("const")])))
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        return _types_of(_at(root, reference), root, depth - 1)
    options = next((schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)), None)
    if options is None:
        return None
    found = [_types_of(option, root, depth - 1) for option in options]
    return frozenset().union(*(types for types in found if types)) if all(found) else None


def _at(root: Mapping[str, Any], reference: str) -> object:
    """What a reference within the schema leads to; None where there is nothing."""
    place: object = root
    for name in reference.removeprefix("#/").split("/"):
        place = place.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
    return place
