"""Finds calls that are JSON objects without a mark, as Llama 3 writes them. Pure."""

import re
from collections.abc import Mapping
from typing import Any

from kvloom.server.chat.answer_events import AnswerEvents
from kvloom.server.chat.events import ChatEvent
from kvloom.server.chat.json_calls import CallScanner, Check, CheckedScanner
from kvloom.server.chat.told_call import ToldCall

PYTHON_TAG = "<|python_tag|>"
_LINE = re.compile(r"^[ \t]*\{", re.MULTILINE)


class BareCalls:
    """An answer that consists of calls of known tools, which `<|python_tag|>` may precede, or a text with such
    calls, each at the beginning of a line.
    """

    def __init__(
        self,
        schemas: Mapping[str, Mapping[str, Any]],
        hidden: tuple[str, ...] = (),
        loose: Mapping[str, Check | None] | None = None,
    ) -> None:
        """`loose`: tools whose calls may stand behind a text; see tool_calls.make_parser."""
        self._names, self._hidden, self._loose = frozenset(schemas), hidden, loose or {}
        self._events = AnswerEvents()
        self._lead = ""  # white space and `;` before the next call
        self._call: ToldCall | None = None
        self._is_text = False
        self._is_line_begun = False  # of the text: whether something but spaces stands in its last line

    def add(self, text: str) -> list[ChatEvent]:
        while text:
            if self._call is not None:
                text = self._read_call(self._call, text)
            elif self._is_text:
                text = self._read_text(text)
            else:
                text = self._read_lead(text)
        return self._events.drain()

    def finish(self, is_cut: bool = False) -> list[ChatEvent]:
        """A bare object in a cut answer may be a JSON answer: without a mark or a name it is text."""
        if self._call is not None and (is_cut or self._call.is_told):
            self._call.cut(is_cut)
        is_marked = bool(self._events.num_calls) or self._lead.strip() == PYTHON_TAG
        if is_cut and is_marked and not self._is_text:
            pass
        elif self._call is not None:
            if not self._call.is_told:
                self._events.text(self._lead + self._call.raw)
        elif not self._is_text and (not self._events.num_calls or self._lead.strip(" \t\r\n;")):
            if self._lead.strip() in self._hidden:
                self._lead = ""
            self._events.text(self._lead)
        self._events.end()
        return self._events.drain()

    # Each of these reads a part of the text and returns what follows it.

    def _read_lead(self, text: str) -> str:
        """What may stand before a call."""
        for index, char in enumerate(text):
            if char == "{" and self._lead.strip() in (("", ";") if self._events.num_calls else ("", PYTHON_TAG)):
                scanner = CallScanner(self._names, needs_arguments=True)
                self._call = ToldCall(scanner, self._events)
                return text[index:]
            self._lead += char
            lead = self._lead.strip()
            if self._events.num_calls and any(mark.startswith(lead) for mark in self._hidden):
                continue
            if not (";" if self._events.num_calls else PYTHON_TAG).startswith(lead):
                self._to_text(self._lead)
                return text[index + 1 :]
        return ""

    def _read_call(self, call: ToldCall, text: str) -> str:
        for index, char in enumerate(text):
            call.take(char)
            if call.is_failed:
                self._to_text(char if call.is_told else self._lead + call.raw)
                return text[index + 1 :]
            if call.is_over:
                self._lead, self._call, self._is_text = "", None, False
                return text[index + 1 :]
        return ""

    def _read_text(self, text: str) -> str:
        """Text up to an object that begins a line."""
        begun = "x" if self._is_line_begun else ""
        found = _LINE.search(begun + text) if self._loose and "{" in text else None
        at = found.end() - 1 - len(begun) if found else len(text)
        self._tell(text[:at])
        if found:
            self._lead, self._call = "", ToldCall(CheckedScanner(self._loose), self._events)
        return text[at:]

    def _to_text(self, text: str) -> None:
        self._is_text, self._call = True, None
        self._tell(text)

    def _tell(self, text: str) -> None:
        line = text.rpartition("\n")[2]
        self._is_line_begun = bool(line.strip()) or (self._is_line_begun and "\n" not in text)
        self._events.text(text)
