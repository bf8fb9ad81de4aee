"""Calls in OpenAI's /v1/responses: the item of each, built piece by piece."""

import json
from collections.abc import Generator, Iterator
from typing import Any

import msgspec

from kvloom.server.dialects.ids import new_id
from kvloom.server.dialects.responses.tools import CUSTOM, FUNCTION, INPUT, Offered

Json = dict[str, Any]
_PIECES = {FUNCTION: "response.function_call_arguments", CUSTOM: "response.custom_tool_call_input"}


class CallItem:
    """One call. Of function and custom calls the field grows; others get theirs at the end."""

    def __init__(self, offered: Offered) -> None:
        kind = offered.kind
        self._type, self._kind, self._text = offered.type, kind, ""
        self._events = _PIECES.get(offered.type)
        self._input = InputText() if offered.type == CUSTOM else None
        named = {"name": offered.name} if self._events else {}
        self.item: Json = {
            "id": f"{kind.id}_{new_id()}",
            "type": kind.item,
            "status": "in_progress",
            "call_id": f"call_{new_id()}",
            **named,
            **({"namespace": offered.namespace} if offered.namespace else {}),
            **({"execution": "client"} if kind.item == "tool_search_call" else {}),
            kind.holds: "" if self._events else dict(kind.given),
        }

    def add(self, arguments: str) -> Iterator[tuple[str, Json]]:
        """More of the arguments' JSON text: the events that tell it."""
        self._text += arguments
        yield from self._more(arguments if self._input is None else self._input.add(arguments))

    def end(self) -> Iterator[tuple[str, Json]]:
        """No more arguments come."""
        if self._events is None:
            self.item[self._kind.holds] = {**self._kind.given, **_object_of(self._text)}
            return
        if self._input is not None and not self._input.is_found:
            yield from self._more(_only_text(self._text))
        names = ("name", "arguments") if self._type == FUNCTION else (INPUT,)
        yield f"{self._events}.done", {name: self.item[name] for name in names}

    def _more(self, text: str) -> Iterator[tuple[str, Json]]:
        if text and self._events is not None:
            self.item[self._kind.holds] += text
            yield f"{self._events}.delta", {"delta": text}


def _object_of(text: str) -> Json:
    try:
        return msgspec.json.decode(text, type=Json)
    except (ValueError, RecursionError):
        return {}


def _only_text(text: str) -> str:
    """A custom call's input from arguments under another name than its own."""
    values = list(_object_of(text).values())
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
