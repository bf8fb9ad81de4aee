"""Finds tool calls in a model's output, in the form that its chat template teaches.

  hermes       <tool_call>{"name": "f", "arguments": {...}}</tool_call>; Qwen2.5, Qwen3, Hermes
  qwen3_coder  <tool_call><function=f><parameter=a>1</parameter></function></tool_call>
  llama3       the whole answer is {"name": "f", "parameters": {...}}, or several of these after `;`

The parsers are pure: however the text is cut, the joined events are the same. Text that is not a call is returned as
text, completely; white space around calls is dropped.
"""

from collections.abc import Mapping
from typing import Any, Literal, Protocol

from kvloom.engine.text.stop import overlap
from kvloom.server.chat.events import ChatEvent, TextDelta, ToolCallArguments, ToolCallStart
from kvloom.server.chat.json_calls import CallScanner
from kvloom.server.chat.xml_calls import XmlCallScanner

ToolForm = Literal["hermes", "qwen3_coder", "llama3"]
FORMS: tuple[ToolForm, ...] = ("hermes", "qwen3_coder", "llama3")
OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"


class CallParser(Protocol):
    """Takes an answer's text in pieces; `finish` once, at its end.

    In an answer that was cut (`is_cut`), an unfinished call is not text: it is reported if its name is known, and
    otherwise dropped with its mark.
    """

    def add(self, text: str) -> list[ChatEvent]: ...
    def finish(self, is_cut: bool = False) -> list[ChatEvent]: ...


def make_parser(form: ToolForm, schemas: Mapping[str, Mapping[str, Any]]) -> CallParser:
    """A parser for one answer. `schemas`: of the parameters, by tool."""
    return BareCalls(schemas) if form == "llama3" else MarkedCalls(schemas)


class _Events:
    """Events of one `add`; neighbours of a kind are joined, and white space around calls is dropped."""

    def __init__(self) -> None:
        self.items: list[ChatEvent] = []
        self.num_calls = 0
        self._space = ""  # white space that is text unless a call follows
        self._is_after_call = False

    def drain(self) -> list[ChatEvent]:
        items, self.items = self.items, []
        return items

    def text(self, text: str) -> None:
        if self._is_after_call:
            text = text.lstrip()
        body = (self._space + text).rstrip()
        self._space = (self._space + text)[len(body) :]
        if body:
            self._is_after_call = False
            self._put_text(body)

    def end(self) -> None:
        """No more text comes."""
        if self._space:
            self._put_text(self._space)

    def start(self, name: str) -> None:
        self._space, self._is_after_call = "", True
        self.items.append(ToolCallStart(self.num_calls, name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        last, index = self.items[-1] if self.items else None, self.num_calls - 1
        if isinstance(last, ToolCallArguments) and last.index == index:
            self.items.pop()
            text = last.text + text
        self.items.append(ToolCallArguments(index, text))

    def _put_text(self, text: str) -> None:
        last = self.items[-1] if self.items else None
        if isinstance(last, TextDelta):
            self.items.pop()
            text = last.text + text
        self.items.append(TextDelta(text))


class _Call:
    """A call being read: its scanner, and whether its start was reported."""

    def __init__(self, scanner: CallScanner | XmlCallScanner, events: _Events) -> None:
        self._scanner, self._events = scanner, events
        self.is_told = False

    @property
    def raw(self) -> str:
        return self._scanner.raw

    @property
    def is_over(self) -> bool:
        return self._scanner.is_done or self._scanner.is_failed

    @property
    def is_failed(self) -> bool:
        return self._scanner.is_failed

    def take(self, char: str) -> None:
        arguments = self._scanner.take(char)
        if self._scanner.name is not None and not self.is_told:
            self.is_told = True
            self._events.start(self._scanner.name)
        if arguments:
            self._events.arguments(arguments)

    def cut(self) -> None:
        """No more text comes: report the call if it has a name."""
        if self._scanner.found_name is not None and not self.is_told:
            self.is_told = True
            self._events.start(self._scanner.found_name)


class MarkedCalls:
    """Calls between <tool_call> and </tool_call>, as JSON or as XML, anywhere in the text."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._schemas = schemas
        self._events = _Events()
        self._held = ""
        self._lead: str | None = None  # white space between the mark and the call; None outside a call
        self._call: _Call | None = None
        self._expects_close = False

    def add(self, text: str) -> list[ChatEvent]:
        self._held += text
        while self._held and (self._find_mark() if self._lead is None else self._read_call()):
            pass
        return self._events.drain()

    def finish(self, is_cut: bool = False) -> list[ChatEvent]:
        if is_cut and self._call is not None:
            self._call.cut()
        elif self._lead is not None and not is_cut and not (self._call and self._call.is_told):
            self._events.text(OPEN + self._lead + (self._call.raw if self._call else ""))
        if not (is_cut and self._expects_close and CLOSE.startswith(self._held.lstrip())):
            self._events.text(self._held)
        self._events.end()
        return self._events.drain()

    def _find_mark(self) -> bool:
        """Return text up to the next mark. False when there is none."""
        marks = (OPEN, CLOSE) if self._expects_close else (OPEN,)
        found = min(((at, mark) for mark in marks if (at := self._held.find(mark)) >= 0), default=None)
        if found is None:
            end = len(self._held) - max(overlap(self._held, mark) for mark in marks)
            text, self._held = self._held[:end], self._held[end:]
            self._events.text(text)
            return False
        at, mark = found
        text, self._held = self._held[:at], self._held[at + len(mark) :]
        self._events.text(text)
        if mark == OPEN:
            self._lead = ""
        self._expects_close = False
        return True

    def _read_call(self) -> bool:
        """Read on in the call; whether it is over."""
        for index, char in enumerate(self._held):
            if self._call is None:
                if char.isspace():
                    self._lead = (self._lead or "") + char
                    continue
                self._call = self._begin(char)
            self._call.take(char)
            if self._call.is_over:
                self._end_call(self._call, char, self._held[index + 1 :])
                return True
        self._held = ""
        return False

    def _begin(self, char: str) -> _Call:
        return _Call(XmlCallScanner(self._schemas) if char == "<" else CallScanner(), self._events)

    def _end_call(self, call: _Call, char: str, rest: str) -> None:
        if not call.is_failed:
            self._held = rest
        elif call.is_told:  # text that breaks off a reported call is text again
            self._held = char + rest
        else:  # not a call; its text may contain one
            self._events.text(OPEN)
            self._held = (self._lead or "") + call.raw + rest
        self._expects_close = call.is_told
        self._lead = self._call = None


class BareCalls:
    """An answer that consists of JSON calls of known tools only; `<|python_tag|>` may precede them."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._names = frozenset(schemas)
        self._events = _Events()
        self._lead = ""  # white space and `;` before the next call
        self._call: _Call | None = None
        self._is_text = False

    def add(self, text: str) -> list[ChatEvent]:
        for index, char in enumerate(text):
            if self._is_text:
                self._events.text(text[index:])
                break
            self._take(char)
        return self._events.drain()

    def finish(self, is_cut: bool = False) -> list[ChatEvent]:
        """A bare object in a cut answer may be a JSON answer: without a mark or a name it is text."""
        if is_cut and self._call is not None:
            self._call.cut()
        is_marked = bool(self._events.num_calls) or self._lead.strip() == PYTHON_TAG
        if is_cut and is_marked and not self._is_text:
            pass
        elif self._call is not None:
            if not self._call.is_told:
                self._events.text(self._lead + self._call.raw)
        elif not self._is_text and (not self._events.num_calls or self._lead.strip(" \t\r\n;")):
            self._events.text(self._lead)
        self._events.end()
        return self._events.drain()

    def _take(self, char: str) -> None:
        if self._call is not None:
            self._read_call(self._call, char)
        elif char == "{" and self._lead.strip() in (("", ";") if self._events.num_calls else ("", PYTHON_TAG)):
            self._call = _Call(CallScanner(self._names, needs_arguments=True), self._events)
            self._call.take(char)
        else:
            self._lead += char
            lead = self._lead.lstrip()
            if not (";" if self._events.num_calls else PYTHON_TAG).startswith(lead.rstrip()):
                self._to_text(self._lead)

    def _read_call(self, call: _Call, char: str) -> None:
        call.take(char)
        if call.is_failed:
            self._to_text(char if call.is_told else self._lead + call.raw)
        elif call.is_over:
            self._lead, self._call = "", None

    def _to_text(self, text: str) -> None:
        self._is_text, self._call = True, None
        self._events.text(text)
