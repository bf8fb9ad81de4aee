"""Finds tool calls in a model's output, in the form that its chat template teaches: see form.py.

The parsers are pure: however the text is cut, the joined events are the same. Text that is not a call is returned as
text, completely; white space around calls is dropped.
"""

import re
from collections.abc import Mapping
from typing import Any, Protocol

from kvloom.engine.text.stop import overlap
from kvloom.server.chat.answer_events import AnswerEvents
from kvloom.server.chat.bare_calls import BareCalls
from kvloom.server.chat.call_readers import MarkedReader
from kvloom.server.chat.element_reader import ElementReader
from kvloom.server.chat.events import ChatEvent, ToolCallStart, num_of_half_mark
from kvloom.server.chat.form import ID, KNOWN, MARK, CallForm
from kvloom.server.chat.json_calls import CallScanner, Check, CheckedScanner
from kvloom.server.chat.told_call import ToldCall


class CallParser(Protocol):
    """Takes an answer's text in pieces; `finish` once, at its end.

    In an answer that was cut (`is_cut`), an unfinished call is not text: it is reported if its name is known, and
    otherwise dropped with its mark.
    """

    def add(self, text: str) -> list[ChatEvent]: ...
    def finish(self, is_cut: bool = False) -> list[ChatEvent]: ...


def make_parser(
    form: CallForm,
    schemas: Mapping[str, Mapping[str, Any]],
    hidden: tuple[str, ...] = (),
    loose: Mapping[str, Check | None] | None = None,
) -> CallParser:
    """A parser for one answer. `schemas`: of the parameters, by tool. `hidden`: marks that are dropped. `loose`: tools
    whose calls may also stand where no grammar writes any, if the form is one of JSON objects: in a fenced block, or
    behind a text where calls have no mark. Each has what its arguments must pass there.
    """
    if not form.begin:
        return BareCalls(schemas, hidden, loose)
    return MarkedCalls(form, schemas, hidden, loose if form.kind == "object" else None)


class ToolCall:
    """A call of one of the tools, within reasoning that nothing has ended; see reasoning.MaybeCall."""

    def __init__(self, form: CallForm, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self.mark = form.opening
        self._form, self._schemas = form, schemas

    def is_one(self, text: str, is_whole: bool) -> bool:
        if len(text) > _MAX_UNSURE and not is_whole:
            return True
        parser = make_parser(self._form, self._schemas)
        events = [*parser.add(text), *(parser.finish() if is_whole else ())]
        first = events[0] if events else None
        return isinstance(first, ToolCallStart) and first.name in self._schemas if events else not is_whole


_MAX_UNSURE = 500  # characters of a text that is looked at again with each piece


class MarkedCalls:
    """Calls behind a mark, anywhere in the text."""

    def __init__(
        self,
        form: CallForm,
        schemas: Mapping[str, Mapping[str, Any]],
        hidden: tuple[str, ...] = (),
        fenced: Mapping[str, Check | None] | None = None,
    ) -> None:
        """See make_parser."""
        self._form, self._schemas, self._hidden = form, schemas, hidden
        self._fenced, self._fences = fenced or {}, _FENCES if fenced else ()
        self._in_fence = False  # behind a call in a fenced block
        self._is_line_begun = False  # whether something but spaces stands before what is held
        self._events = AnswerEvents()
        self._held = ""
        self._mark = ""  # of the call that is being read
        self._lead: str | None = None  # white space between the mark and the call; None outside a call
        self._call: ToldCall | None = None
        self._is_known = False  # the call has no mark before its own: only a known tool's is one
        self._opens, self._closes = _opens(form), _closes(form)
        self._is_list = form.kind == "object" or form.opening != form.begin  # calls may stand in one
        self._marks = (*self._opens, *self._hidden, *self._fences)
        self._firsts = frozenset(mark[0] for mark in (*self._marks, *self._closes))
        self._is_behind = False  # of a call: marks that end it may follow
        self._in_section = False  # and so may a call without a mark

    def add(self, text: str) -> list[ChatEvent]:
        self._held += text
        while self._held and self._step():
            pass
        return self._events.drain()

    def finish(self, is_cut: bool = False) -> list[ChatEvent]:
        while self._call is not None and (is_cut or self._call.is_told):
            call, self._lead, self._call = self._call, None, None
            self._held, self._is_behind = call.cut(is_cut), True
            while self._held and self._step():
                pass
        if self._lead is not None and not is_cut:
            self._events.text(self._mark + self._lead + (self._call.raw if self._call else ""))
        held = self._held.lstrip()
        if held.strip() in self._hidden:
            held = self._held = ""
        if not (is_cut and self._is_behind and any(mark.startswith(held) for mark in self._closes)):
            num_half = num_of_half_mark(self._held, (*self._opens, *self._hidden)) if is_cut else 0
            self._events.text(self._held[: len(self._held) - num_half])
        self._events.end()
        return self._events.drain()

    def _step(self) -> bool:
        """Read on; False when there is nothing more to find."""
        if self._lead is not None:
            return self._read_call()
        if self._in_fence:
            return self._find_fence_end()
        return self._find_next() if self._in_section else self._find_mark()

    def _find_next(self) -> bool:
        """In a section, behind a call: another one, or the section's end."""
        between = self._form.between.strip()
        rest = self._held.lstrip()
        if not rest:
            return False
        if between and rest.startswith(between):
            self._held = rest[len(between) :]
            return True
        for mark in self._closes:
            if rest.startswith(mark):
                self._held = rest[len(mark) :]
                self._in_section = mark not in self._form.end
                return True
        if any(mark.startswith(rest) for mark in (*self._closes, *self._opens)):
            return False
        own = (self._form.head.split(ID)[0].split() or [""])[0]
        own = own if own.startswith(_TAGS) else own[:1]
        if len(rest) < len(own) and own.startswith(rest):
            return False
        self._in_section = False
        if (rest.startswith(own) if own else rest[0] != "<") and not rest.startswith(self._opens[0]):
            self._mark, self._lead = "", ""
        return True

    def _find_fence_end(self) -> bool:
        """In a fenced block, behind a call: the block's end, or another call."""
        rest = self._held.lstrip(" \t\r\n,]")
        if not rest or (_FENCE.startswith(rest) and rest != _FENCE):
            return False
        self._in_fence = False
        if rest.startswith(_FENCE):
            self._held = rest[len(_FENCE) :]
        elif rest[0] == "{":
            self._mark, self._lead, self._held = _FENCE, "", rest
        return True

    def _find_mark(self) -> bool:
        """Return text up to the next mark. False when there is none."""
        if self._firsts.isdisjoint(self._held):
            self._tell(len(self._held))
            return False
        marks = (*self._marks, *self._closes) if self._is_behind else self._marks
        found = min(((at, -len(mark), mark) for mark in marks if (at := self._place_of(mark)) >= 0), default=None)
        if found is None:
            self._tell(len(self._held) - max(overlap(self._held, mark) for mark in marks))
            return False
        at, _, mark = found
        if any(len(self._held) - at < len(other) and other.startswith(self._held[at:]) for other in marks):
            self._tell(at)  # it may become a longer mark
            return False
        self._tell(at)
        self._held = self._held[len(mark) :]
        if mark in self._fences:
            self._mark, self._lead = mark, ""
        elif mark in self._opens:
            self._mark, self._lead = mark, ""
            self._is_known = mark != self._opens[0]
            if self._is_known:  # the call's own mark, without the one before it
                self._mark, self._held = "", mark + self._held
        self._is_behind = self._is_behind and mark in self._hidden
        return True

    def _place_of(self, mark: str) -> int:
        """Where a mark stands; -1 = nowhere. A fence begins a line."""
        if mark not in self._fences:
            return self._held.find(mark)
        text = ("x" if self._is_line_begun else "") + self._held
        found = re.search(rf"^[ \t]*{mark}", text, re.MULTILINE)
        return found.end() - len(mark) - self._is_line_begun if found else -1

    def _tell(self, num: int) -> None:
        """That many characters are text."""
        text, self._held = self._held[:num], self._held[num:]
        line = text.rpartition("\n")[2]
        self._is_line_begun = bool(line.strip()) or (self._is_line_begun and "\n" not in text)
        self._events.text(text)

    def _read_call(self) -> bool:
        """Read on in the call; whether it is over."""
        for index, char in enumerate(self._held):
            if self._call is None:
                if char.isspace() or (char == "[" and self._is_list):
                    self._lead = (self._lead or "") + char
                    continue
                self._call = self._begin(char)
            self._call.take(char)
            if self._call.is_over:
                self._end_call(self._call, char, self._held[index + 1 :])
                return True
        self._held = ""
        return False

    def _begin(self, char: str) -> ToldCall:
        """The reader of a call; in a form of JSON, of one as XML, and the other way round, where its mark says so."""
        if self._mark in self._fences:
            return ToldCall(CheckedScanner(self._fenced), self._events)
        if self._form.kind == "object":
            is_xml = char == "<" and self._form.begin == _XML.begin
            return ToldCall(MarkedReader(_XML, self._schemas) if is_xml else CallScanner(), self._events)
        if char == "{" and self._form.begin == _XML.begin:
            return ToldCall(CallScanner(), self._events)
        names = self._schemas.keys() if self._is_known else None
        reader = ElementReader if self._form.kind == "elements" else MarkedReader
        return ToldCall(reader(self._form, self._schemas, names), self._events)

    def _end_call(self, call: ToldCall, char: str, rest: str) -> None:
        if not call.is_failed:
            self._held = rest
        elif call.is_told:  # text that breaks off a reported call is text again
            self._held = char + rest
        else:  # not a call; its text may contain one
            self._events.text(self._mark if self._mark else call.raw[:1])
            self._is_line_begun = True
            self._held = (self._lead or "") + call.raw[0 if self._mark else 1 :] + rest
        self._is_behind = call.is_told
        self._in_fence = call.is_told and not call.is_failed and self._mark in self._fences
        self._in_section = not self._in_fence and call.is_told and not call.is_failed and self._form.is_section
        self._lead = self._call = None
        self._is_known = False


_XML = KNOWN["qwen3_coder"]
_FENCE = "```"
_FENCES = (_FENCE + "json", _FENCE)  # what begins a block


def _opens(form: CallForm) -> tuple[str, ...]:
    """What begins a call in a text: its mark, or the one that follows it, if a model leaves the first one out."""
    own = form.head.split(ID)[0].strip()
    return (form.opening, own) if own.startswith(_TAGS) and len(own) >= _MIN_MARK else (form.opening,)


_TAGS = ("<", "]<]")  # what tags begin with
_MIN_MARK = 8  # characters of a mark that nobody writes by chance


def _closes(form: CallForm) -> tuple[str, ...]:
    """What ends a call, or all of them, behind what its reader has taken."""
    if form.kind == "elements":
        return tuple(form.end.split())
    behind = form.tail + form.end if form.kind == "json" else form.end
    if form.kind == "tagged" and not form.tail.strip():
        return ()  # the end of the mark is that of the call, which its reader takes
    return tuple(re.findall(rf"{MARK}|[^<\s]+", behind))
