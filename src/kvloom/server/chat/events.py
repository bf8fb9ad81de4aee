"""The events of a chat answer in any protocol: text, reasoning and tool calls, piece by piece."""

from collections.abc import Iterable
from dataclasses import dataclass

from kvloom.engine.text.stop import overlap


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """Call number `index` (0, 1, ... within one answer) begins; the dialect makes up its id."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the JSON text of call `index`'s arguments. Joined they are one object, unless the answer was cut."""

    index: int
    text: str


ChatEvent = TextDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


def num_of_half_mark(text: str, marks: Iterable[str]) -> int:
    """Characters at the end of a text that was cut which begin a mark, and so are no text. A single one is a text: more
    answers have it than marks.
    """
    num = max((overlap(text, mark) for mark in marks if mark), default=0)
    return num if num > 1 else 0
