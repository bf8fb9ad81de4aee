"""One chat answer as events: reasoning first, then text and tool calls. Knows no protocol."""

from kvloom.contract.request import Delta, FinishReason
from kvloom.server.chat.channels import ChannelReader
from kvloom.server.chat.events import ChatEvent, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart
from kvloom.server.chat.reasoning import ReasoningSplitter
from kvloom.server.chat.tool_calls import CallParser


class ChatOutput:
    """Takes the deltas of one choice; the last one, which has a finish_reason, releases the text held back."""

    def __init__(
        self,
        reasoning: ReasoningSplitter | None = None,
        calls: CallParser | None = None,
        max_calls: int | None = None,
        has_text: bool = True,
    ) -> None:
        """`reasoning`, `calls`: parsers, or None where there are none. Calls after `max_calls` are dropped.

        `calls` reads the reasoning too where it is a ChannelReader. `has_text`: False for an answer whose grammar
        allows calls only.
        """
        self.num_calls = 0
        self.num_reasoning_tokens = 0
        self._reasoning, self._calls, self._max_calls = reasoning, calls, max_calls
        self._channels = calls if isinstance(calls, ChannelReader) else None
        self._has_text = has_text

    def add(self, delta: Delta) -> list[ChatEvent]:
        was_open = self._channels is not None and self._channels.is_open
        events = self._split(delta)
        if self._calls is not None:
            found: list[ChatEvent] = []
            for event in events:
                found += self._calls.add(event.text) if isinstance(event, TextDelta) else [event]
            is_cut = delta.finish_reason is not FinishReason.EOS
            events = found + (self._calls.finish(is_cut) if delta.finish_reason else [])
        if self._channels is not None and (
            was_open or self._channels.is_open or any(isinstance(event, ReasoningDelta) for event in events)
        ):
            self.num_reasoning_tokens += len(delta.token_ids)
        return [event for event in events if self._is_kept(event)]

    def _split(self, delta: Delta) -> list[ChatEvent]:
        if self._reasoning is None:
            return [TextDelta(delta.text)] if delta.text else []
        was_open = self._reasoning.is_open
        events = self._reasoning.add(delta.text)
        if was_open or self._reasoning.is_open or any(isinstance(event, ReasoningDelta) for event in events):
            self.num_reasoning_tokens += len(delta.token_ids)
        return events + (
            self._reasoning.finish(delta.finish_reason is not FinishReason.EOS) if delta.finish_reason else []
        )

    def _is_kept(self, event: ChatEvent) -> bool:
        if isinstance(event, TextDelta):
            return self._has_text
        if isinstance(event, ToolCallStart):
            self.num_calls = max(self.num_calls, min(event.index + 1, self._max_calls or event.index + 1))
        if self._max_calls is None or not isinstance(event, ToolCallStart | ToolCallArguments):
            return True
        return event.index < self._max_calls
