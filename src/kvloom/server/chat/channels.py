"""Reads answers that are several messages, each behind a header: reasoning, text, calls. See form.Channels. Pure."""

import re
from collections.abc import Mapping
from typing import Any, Literal

from kvloom.engine.text.stop import overlap
from kvloom.server.chat.answer_events import AnswerEvents
from kvloom.server.chat.events import ChatEvent, num_of_half_mark
from kvloom.server.chat.form import NO_CALLS, Channels
from kvloom.server.chat.json_calls import JsonValue
from kvloom.server.chat.tool_calls import make_parser

_MAX_HEADER = 256  # characters
Begun = Literal["header", "reasoning", "text"]


class ChannelReader:
    """Takes an answer's text in pieces, cut anywhere; `finish` once, at its end. Text of no known form stays text.

    A call whose body is no JSON object is text with its header.
    """

    def __init__(self, form: Channels, schemas: Mapping[str, Mapping[str, Any]], begun: Begun = "header") -> None:
        """`schemas`: of the parameters, by tool; none: nothing is a call. `begun`: what the prompt ends within."""
        self._form, self._schemas = form, schemas
        self._events = AnswerEvents()
        self._inner = None if form.calls.kind == "json" else make_parser(form.calls if schemas else NO_CALLS, schemas)
        self._held = ""
        self._header = ""  # of the message that is being read
        self._kind: Begun | Literal["call"] = begun
        self._value: JsonValue | None = None  # the arguments of the call that is being read
        self._is_fresh = True  # nothing of the reasoning was told yet

    @property
    def is_open(self) -> bool:
        """Whether the answer is within its reasoning."""
        return self._kind == "reasoning"

    def add(self, text: str) -> list[ChatEvent]:
        self._held += text
        while self._held and self._step():
            pass
        return self._events.drain()

    def finish(self, is_cut: bool = False) -> list[ChatEvent]:
        if is_cut and self._kind in ("reasoning", "text"):
            num_half = num_of_half_mark(self._held, (*self._form.ends, self._form.start))
            self._held = self._held[: len(self._held) - num_half]
        if self._kind == "call" and (self._value is not None or is_cut):
            if self._value is None:
                self._events.start(self._name())
            self._events.end_call(is_whole=False)
        elif self._kind == "reasoning":
            self._reason(self._held.rstrip())
        elif not (is_cut and self._kind == "header" and self._begins_header(self._held)):
            self._text((self._header if self._kind == "call" else "") + self._held)
        if self._inner is not None:
            self._events.items += self._inner.finish(is_cut)
        self._events.end()
        return self._events.drain()

    def _step(self) -> bool:
        """Read on; False when more must come first."""
        match self._kind:
            case "header":
                return self._read_header()
            case "call":
                return self._read_call()
        return self._read_body()

    # -- headers

    def _read_header(self) -> bool:
        form = self._form
        held = self._held.lstrip()
        marks = (*form.ends, form.start)
        mark = next((mark for mark in marks if held.startswith(mark)), None)
        if mark is not None:
            self._held = held[len(mark) :]
            return True
        at = held.find(form.body)
        if at < 0 and (any(mark.startswith(held) for mark in (*marks, form.body)) or self._begins_header(held)):
            return False
        if at < 0 or not self._is_header(held[:at]):
            self._kind = "text"
            return True
        self._header, self._held = held[:at], held[at + len(form.body) :]
        self._kind = self._kind_of(self._header)
        self._value, self._is_fresh = None, True
        return True

    def _begins_header(self, text: str) -> bool:
        """Whether a header may begin so."""
        text = text.lstrip()
        openings = self._form.openings or (*self._schemas, self._form.plain)
        if len(text) > _MAX_HEADER or (self._form.body in text and self._form.openings):
            return False
        if not self._form.openings:
            return any(name.startswith(text) for name in openings)
        return any(text.startswith(opening) or opening.startswith(text) for opening in openings)

    def _is_header(self, text: str) -> bool:
        openings = self._form.openings
        if not openings:
            return text in (*self._schemas, self._form.plain)
        return self._begins_header(text) and (not text.strip() or text.lstrip().startswith(openings))

    def _kind_of(self, header: str) -> Begun | Literal["call"]:
        if self._name(header):
            return "call"
        return "reasoning" if re.search(self._form.reasoning, header) else "text"

    def _name(self, header: str | None = None) -> str:
        """The function that a message calls; "" = none. A bare recipient must be one of the tools."""
        found = re.search(self._form.call, self._header if header is None else header)
        if not found or not self._schemas:
            return ""
        parts = found.groupdict()
        own = parts.get("own") or ""
        return parts.get("name") or (own if own in self._schemas else "")

    # -- bodies

    def _read_body(self) -> bool:
        """Text or reasoning up to the end of the message."""
        form = self._form
        text = self._held.lstrip() if self.is_open and self._is_fresh else self._held
        marks = (*form.ends, form.start)
        found = min(((at, mark) for mark in marks if (at := self._end_at(text, mark)) >= 0), default=None)
        if found is None:
            end = len(text) - max(self._open_end(text, mark) for mark in marks)
            end = len(text[:end].rstrip()) if self.is_open else end
            self._tell(text[:end])
            self._held = text[end:]
            return False
        at, mark = found
        self._tell(text[:at].rstrip() if self.is_open else text[:at])
        self._held = text[at + len(mark) :]
        self._kind = "header"
        return bool(self._held)

    def _end_at(self, text: str, mark: str) -> int:
        """Where a message ends with this mark; -1 = nowhere. A mark that may be text needs a header behind it."""
        if mark != self._form.start or self._form.openings:
            return text.find(mark)
        names = "|".join(map(re.escape, (*self._schemas, self._form.plain)))
        found = re.search(rf"{re.escape(mark)}(?=(?:{names}){self._form.body})", text)
        return found.start() if found else -1

    def _open_end(self, text: str, mark: str) -> int:
        """How many characters at the end of a text may begin a mark."""
        if mark == self._form.start and not self._form.openings:
            at = text.rfind(mark)
            if at >= 0 and self._begins_header(text[at + len(mark) :]):
                return len(text) - at
        return overlap(text, mark)

    def _tell(self, text: str) -> None:
        if self.is_open:
            self._reason(text)
        else:
            self._text(text)

    def _reason(self, text: str) -> None:
        self._events.reasoning(text)
        self._is_fresh = self._is_fresh and not text

    def _text(self, text: str) -> None:
        if self._inner is None:
            self._events.text(text)
        elif text:
            self._events.items += self._inner.add(text)

    # -- calls

    def _read_call(self) -> bool:
        """The arguments: a JSON object; what follows it belongs to no message."""
        if self._value is None:
            held = self._held.lstrip()
            if not held:
                return False
            if held[0] != "{":
                self._events.text(self._header + self._form.body)
                self._kind = "text"
                return True
            self._value = JsonValue()
            self._events.start(self._name())
        text = self._held if self._value.is_begun else self._held.lstrip()
        end = next((index + 1 for index, char in enumerate(text) if self._value.add(char)), None)
        self._events.arguments(text[:end])
        self._held = "" if end is None else text[end:]
        if end is not None:
            self._events.end_call(is_whole=True)
            self._kind, self._value = "header", None
        return bool(self._held)
