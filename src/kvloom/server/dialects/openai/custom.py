"""Custom tools: their input is a text, which the model writes as the only argument of a function."""

import json
from collections.abc import Generator
from typing import Any

import msgspec

from kvloom.server.chat.grammars import lark_grammar
from kvloom.server.chat.lark_regex import NotRegular, regex_of_lark
from kvloom.server.chat.tools import Tool
from kvloom.server.serving.notes import note

INPUT = "input"  # the argument
_FORMAT = "format"  # the caller's field with the form of the input
Json = dict[str, Any]


def custom_tool(name: str, description: str, form: Json, field: str) -> Tool:
    """`form`: of the input, if it has the type grammar its `syntax` and `definition`. The input is held to a regular
    expression, and to a Lark grammar that is one; another grammar is shown to the model. Raises BadRequest.
    """
    definition, syntax = form.get("definition"), form.get("syntax")
    if not isinstance(definition, str):
        return Tool(name, description, _parameters(), field=field, is_custom=True)
    if syntax == "regex":
        shown = _parameters(definition)
        return Tool(name, description, shown, True, field, _FORMAT, is_custom=True)
    description = f"{description}\n\nThe input follows this grammar ({syntax}):\n{definition}".strip()
    held = _held(definition, f"{field}.{_FORMAT}") if syntax == "lark" else None
    if held is None:
        note(f"{field}.{_FORMAT} is told to the model, and not held")
    return Tool(name, description, _parameters(), held is not None, field, _FORMAT, is_custom=True, held=held)


def _parameters(pattern: str | None = None) -> Json:
    content: Json = {"type": "string"}
    if pattern is not None:
        content["pattern"] = f"^(?:{pattern})$"
    return {"type": "object", "properties": {INPUT: content}, "required": [INPUT], "additionalProperties": False}


def _held(definition: str, field: str) -> Json | None:
    """The schema of an input that follows a Lark grammar, if that is a regular expression. Raises BadRequest."""
    lark_grammar(definition, field)
    try:
        return _parameters(regex_of_lark(definition))
    except NotRegular:
        return None


def input_of(arguments: str) -> str:
    """The input, of the arguments' JSON text."""
    reader = InputText()
    text = reader.add(arguments)
    return text if reader.is_found else only_text(arguments)


def object_of(text: str) -> Json:
    try:
        return msgspec.json.decode(text, type=Json)
    except (ValueError, RecursionError):
        return {}


def only_text(text: str) -> str:
    """A custom call's input from arguments under another name than its own."""
    values = list(object_of(text).values())
    if len(values) != 1:
        return text
    return values[0] if isinstance(values[0], str) else json.dumps(values[0], ensure_ascii=False)


class InputText:
    """Reads the text of the member `input` out of an object's JSON text, piece by piece."""

    def __init__(self) -> None:
        self.is_found = False
        self._char = self._out = self._half = ""
        self._is_over = False
        self._steps = self._read()
        next(self._steps)

    def add(self, text: str) -> str:
        """The newly known part of the text."""
        self._out = ""
        for char in text:
            if self._is_over:
                break
            self._char = char
            try:
                self._steps.send(None)
            except StopIteration:
                self._is_over = True
        return self._out

    def _read(self) -> Generator[None, None, None]:
        yield
        begin = ""
        while begin != '{"' + INPUT + '":"':
            begin += "" if self._char.isspace() else self._char
            if not ('{"' + INPUT + '":"').startswith(begin):
                return
            yield
        self.is_found = True
        while self._char != '"':
            if self._char == "\\":
                yield from self._escape()
            else:
                self._put(self._char)
            yield

    def _escape(self) -> Generator[None, None, None]:
        yield
        digits = ""
        while digits or self._char == "u":
            yield
            digits += self._char
            if len(digits) == _NUM_DIGITS:
                break
        try:
            self._put(json.loads(f'"\\u{digits}"' if digits else f'"\\{self._char}"'))
        except ValueError:
            self._put(digits or self._char)

    def _put(self, text: str) -> None:
        """More of the text, in which the first half of a character waits for the second."""
        whole, self._half = self._half + text, ""
        if "\ud800" <= whole[-1:] <= "\udbff":
            whole, self._half = whole[:-1], whole[-1]
        self._out += whole.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


_NUM_DIGITS = 4  # of an escaped code unit
