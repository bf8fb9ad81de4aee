"""What a chat answer consists of, whatever protocol shows it: text, reasoning, and calls of tools, piece by piece."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """Call number `index` (0, 1, ... within one answer) begins; its id is made up by the dialect."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the JSON text of call `index`'s arguments. Joined they are one object, unless the answer was cut."""

    index: int
    text: str


ChatEvent = TextDelta | ReasoningDelta | ToolCallStart | ToolCallArguments
