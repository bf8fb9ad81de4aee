"""The events of one answer while they are gathered. Pure."""

from kvloom.server.chat.events import ChatEvent, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart
from kvloom.server.chat.open_json import OpenJson


class AnswerEvents:
    """Events of one `add`; neighbours of a kind are joined, and white space around calls is dropped."""

    def __init__(self) -> None:
        self.items: list[ChatEvent] = []
        self.num_calls = 0
        self._space = ""  # white space that is text unless a call follows
        self._is_after_call = False
        self._open = OpenJson()  # the arguments of the last call
        self._coming = ""  # those that were not looked at yet

    def drain(self) -> list[ChatEvent]:
        if self._coming:
            self._look()
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
        self._look()
        self._space, self._is_after_call = "", True
        self.items.append(ToolCallStart(self.num_calls, name))
        self.num_calls += 1
        self._open = OpenJson()

    def arguments(self, text: str) -> None:
        """More of the arguments' JSON text, which is told as far as it can be closed."""
        self._coming += text

    def end_call(self, is_whole: bool) -> None:
        """The arguments have ended, or were cut off: then their text is closed."""
        self._look()
        self._put_arguments(self._open.rest() if is_whole else self._open.close())

    def reasoning(self, text: str) -> None:
        last = self.items[-1] if self.items else None
        if isinstance(last, ReasoningDelta):
            self.items.pop()
            text = last.text + text
        if text:
            self.items.append(ReasoningDelta(text))

    def _look(self) -> None:
        """Tell what has come of the arguments, all at once: they come character by character."""
        coming, self._coming = self._coming, ""
        self._put_arguments(self._open.add(coming))

    def _put_arguments(self, text: str) -> None:
        if not text:
            return
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
