"""One tool call as Qwen3-Coder writes it: `<function=NAME><parameter=KEY>VALUE</parameter>...</function>`."""

import json
from collections.abc import Mapping
from typing import Any

FUNCTION, PARAMETER = "<function=", "<parameter="
_END_FUNCTION, _END_PARAMETER = "</function>", "</parameter>"


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
        properties = self._schemas.get(self.name or "", {}).get("properties")
        schema = properties.get(key.strip()) if isinstance(properties, dict) else None
        text = json.dumps(_typed(_without_newlines(value), schema), ensure_ascii=False)
        start = ", " if self._num_given else "{"
        self._num_given += 1
        return f"{start}{json.dumps(key.strip(), ensure_ascii=False)}: {text}"


def _without_newlines(value: str) -> str:
    """The value without the newlines that the template puts around it."""
    return value.removeprefix("\n").removesuffix("\n")


def _typed(value: str, schema: Any) -> Any:
    """A text where the schema wants one; otherwise JSON if it is valid."""
    if isinstance(schema, dict) and schema.get("type") == "string":
        return value
    try:
        return json.loads(value, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return value


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")
