"""The events of a chat answer in any protocol: text, reasoning and tool calls, piece by piece."""

from dataclasses import dataclass


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
