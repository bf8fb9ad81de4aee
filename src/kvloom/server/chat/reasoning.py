"""Separates a model's reasoning, which stands between marks before the answer, from its answer."""

from kvloom.engine.text.stop import overlap
from kvloom.server.chat.events import ChatEvent, ReasoningDelta, TextDelta
from kvloom.server.chat.form import THINK, Thinking


class ReasoningSplitter:
    """Takes an answer's text in pieces, cut anywhere; `finish` once, at its end. Pure.

    White space around the reasoning, and between it and the answer, is dropped.
    """

    def __init__(self, is_open: bool, marks: Thinking = THINK, breaks: tuple[str, ...] = ()) -> None:
        """`is_open`: the prompt ends with the first mark, so the answer begins with reasoning. `breaks`: marks that end
        the reasoning too, and belong to the answer.
        """
        self._begin, self._end = marks.begin, marks.end
        self._ends = (marks.end, *breaks)
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

    def finish(self) -> list[ChatEvent]:
        held, self._held = self._held, ""
        if self.is_open:
            held = held.rstrip()
            return [ReasoningDelta(held)] if held else []
        return [TextDelta(held)] if held else []

    def _decide(self) -> bool:
        begin = self._held.lstrip()
        if begin.startswith(self._begin):
            self.is_open, self._is_undecided, self._held = True, False, begin[len(self._begin) :]
        elif not self._begin.startswith(begin):
            self._is_undecided = self._is_fresh = False
        return not self._is_undecided

    def _read_reasoning(self, events: list[ChatEvent]) -> None:
        text = self._held.lstrip() if self._is_fresh else self._held
        found = min(((at, mark) for mark in self._ends if (at := text.find(mark)) >= 0), default=None)
        if found is not None:
            at, mark = found
            known, self._held = text[:at].rstrip(), text[at + (len(mark) if mark == self._end else 0) :]
        else:
            known = text[: len(text) - max(overlap(text, mark) for mark in self._ends)].rstrip()
            self._held = text[len(known) :]
        if known:
            self._is_fresh = False
            events.append(ReasoningDelta(known))
        if found is not None:
            self.is_open, self._is_fresh = False, True

    def _read_text(self, events: list[ChatEvent]) -> None:
        text = self._held.lstrip() if self._is_fresh else self._held
        self._held = ""
        if text:
            self._is_fresh = False
            events.append(TextDelta(text))
