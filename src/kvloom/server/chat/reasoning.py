"""Separates a model's reasoning, which stands between marks before the answer, from its answer."""

from typing import Protocol

from kvloom.engine.text.stop import overlap
from kvloom.server.chat.events import ChatEvent, ReasoningDelta, TextDelta, num_of_half_mark
from kvloom.server.chat.form import THINK, Thinking


class MaybeCall(Protocol):
    """A call that may end the reasoning. `mark`: its beginning."""

    mark: str

    def is_one(self, text: str, is_whole: bool) -> bool:
        """Whether a text that begins with the mark may become a call, or is one if `is_whole`."""


class ReasoningSplitter:
    """Takes an answer's text in pieces, cut anywhere; `finish` once, at its end. Pure.

    White space around the reasoning, and between it and the answer, is dropped.
    """

    def __init__(
        self, is_open: bool, marks: Thinking = THINK, breaks: tuple[str, ...] = (), call: MaybeCall | None = None
    ) -> None:
        """`is_open`: the prompt ends with the first mark, so the answer begins with reasoning. `breaks`: marks that end
        the reasoning too, and belong to the answer. `call`: what ends it if nothing else does before the answer's end.
        """
        self._begin, self._end = marks.begin, marks.end
        self._ends, self._call = (marks.end, *breaks), call
        self.is_open = is_open
        self._is_undecided = not is_open  # whether the answer begins with the mark is still open
        self._held = ""  # a possible mark, or white space at the end of the reasoning
        self._is_fresh = True  # no text of this part was returned yet

    def add(self, text: str) -> list[ChatEvent]:
        self._held += text
        events: list[ChatEvent] = []
        if self._is_undecided and not self._decide():
            return events
        if self.is_open:
            self._read_reasoning(events)
        if not self.is_open and self._held:
            self._read_text(events)
        return events

    def finish(self, is_cut: bool = False) -> list[ChatEvent]:
        held, self._held = self._held, ""
        if is_cut:
            marks = self._ends if self.is_open else (self._begin, self._end)
            held = held[: len(held) - num_of_half_mark(held, marks)]
        at = -1 if is_cut or not self.is_open else self._begin_of_call(held, is_whole=True)
        if at >= 0:
            before = held[:at].rstrip()
            return [*([ReasoningDelta(before)] if before else []), TextDelta(held[at:])]
        if self.is_open:
            held = held.rstrip()
            return [ReasoningDelta(held)] if held else []
        return [TextDelta(held)] if held else []

    def _decide(self) -> bool:
        begin = self._held.lstrip()
        if begin.startswith(self._begin):
            self.is_open, self._is_undecided, self._held = True, False, begin[len(self._begin) :]
        elif begin.startswith(self._end):  # of no reasoning
            self._is_undecided, self._held = False, begin[len(self._end) :]
        elif not self._begin.startswith(begin) and not self._end.startswith(begin):
            self._is_undecided = self._is_fresh = False
        return not self._is_undecided

    def _read_reasoning(self, events: list[ChatEvent]) -> None:
        text = self._held.lstrip() if self._is_fresh else self._held
        found = min(((at, mark) for mark in self._ends if (at := text.find(mark)) >= 0), default=None)
        if found is not None:
            at, mark = found
            known, self._held = text[:at].rstrip(), text[at + (len(mark) if mark == self._end else 0) :]
        else:
            known = text[: self._num_certain(text)].rstrip()
            self._held = text[len(known) :]
        if known:
            self._is_fresh = False
            events.append(ReasoningDelta(known))
        if found is not None:
            self.is_open, self._is_fresh = False, True

    def _num_certain(self, text: str) -> int:
        """Characters that are reasoning, whatever follows."""
        at = self._begin_of_call(text)
        marks = self._ends if self._call is None else (*self._ends, self._call.mark)
        return at if at >= 0 else len(text) - max(overlap(text, mark) for mark in marks)

    def _begin_of_call(self, text: str, is_whole: bool = False) -> int:
        """Where a call may begin, or stands if `is_whole`; -1 = nowhere."""
        if self._call is None:
            return -1
        at = text.find(self._call.mark)
        while at >= 0 and not self._call.is_one(text[at:], is_whole):
            at = text.find(self._call.mark, at + 1)
        return at

    def _read_text(self, events: list[ChatEvent]) -> None:
        text = self._held.lstrip() if self._is_fresh else self._held
        self._held = ""
        if text:
            self._is_fresh = False
            events.append(TextDelta(text))
