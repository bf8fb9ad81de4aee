"""Calls in OpenAI's /v1/responses: the item of each, built piece by piece."""

from collections.abc import Iterator
from typing import Any

from kvloom.server.dialects.ids import new_id
from kvloom.server.dialects.openai.custom import INPUT, InputText, object_of, only_text
from kvloom.server.dialects.responses.tools import CUSTOM, FUNCTION, Offered

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
            self.item[self._kind.holds] = {**self._kind.given, **object_of(self._text)}
            return
        if self._input is not None and not self._input.is_found:
            yield from self._more(only_text(self._text))
        names = ("name", "arguments") if self._type == FUNCTION else (INPUT,)
        yield f"{self._events}.done", {name: self.item[name] for name in names}

    def _more(self, text: str) -> Iterator[tuple[str, Json]]:
        if text and self._events is not None:
            self.item[self._kind.holds] += text
            yield f"{self._events}.delta", {"delta": text}
