"""Answers of Anthropic's /v1/messages: the message, and the events that it is built from."""

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from kvloom.engine.request import FinishReason
from kvloom.server.chat_events import ChatEvent, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart
from kvloom.server.sse import named_event

Json = dict[str, Any]
_STOP_REASONS = {
    FinishReason.EOS: "end_turn",
    FinishReason.STOP: "stop_sequence",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.ABORT: "end_turn",
}


class MessageWriter:
    """Builds a message from what is generated, and says so in events. Every method returns the events it made.

    A block is opened by the first of its deltas and closed by another block's or the end.
    """

    def __init__(self, id: str, model: str, num_prompt: int, new_id: Callable[[], str]) -> None:
        self.message: Json = {
            "id": id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._new_id = new_id
        self._num_prompt = num_prompt
        self._num_output = self._num_cached = 0
        self._arguments = ""  # JSON text of the open tool_use
        self._encode = msgspec.json.Encoder().encode

    def begin(self) -> bytes:
        return self._event("message_start", message=self.message | {"usage": self._usage()}) + self._event("ping")

    def count(self, num_tokens: int, num_cached: int) -> None:
        """Output tokens more; prompt tokens that were cached."""
        self._num_output += num_tokens
        self._num_cached = max(self._num_cached, num_cached)

    def add(self, events: Iterable[ChatEvent]) -> bytes:
        """More of the answer."""
        chunk = b""
        for event in events:
            match event:
                case TextDelta(text):
                    chunk += self._open({"type": "text", "text": ""})
                    self._block["text"] += text
                    chunk += self._delta(type="text_delta", text=text)
                case ReasoningDelta(text):
                    chunk += self._open({"type": "thinking", "thinking": "", "signature": ""})
                    self._block["thinking"] += text
                    chunk += self._delta(type="thinking_delta", thinking=text)
                case ToolCallStart(_, name):
                    id = f"toolu_{self._new_id()}"
                    chunk += self._open({"type": "tool_use", "id": id, "name": name, "input": {}}, is_new=True)
                case ToolCallArguments(_, text):
                    self._arguments += text
                    chunk += self._delta(type="input_json_delta", partial_json=text)
        return chunk

    def end(self, reason: FinishReason, stop: str | int | None) -> bytes:
        """`stop`: the stop sequence that ended it. A call was the aim of an answer that was not cut."""
        has_calls = any(block["type"] == "tool_use" for block in self.message["content"])
        said = {
            "stop_reason": "tool_use" if has_calls and reason is FinishReason.EOS else _STOP_REASONS[reason],
            "stop_sequence": stop if isinstance(stop, str) else None,
        }
        chunk = self._close()
        self.message |= said | {"usage": self._usage()}
        return chunk + self._event("message_delta", delta=said, usage=self._usage()) + self._event("message_stop")

    # -- blocks

    @property
    def _block(self) -> Json:
        """The open one."""
        block: Json = self.message["content"][-1]
        return block

    def _open(self, block: Json, is_new: bool = False) -> bytes:
        """Unless one of its type is open, and no new one is wanted."""
        blocks = self.message["content"]
        if blocks and self._block["type"] == block["type"] and not is_new:
            return b""
        chunk = self._close()
        blocks.append(block)
        return chunk + self._of_block("content_block_start", content_block=block)

    def _close(self) -> bytes:
        """The open block, if there is one. Arguments that the end cut off are no object, and left out."""
        if not self.message["content"]:
            return b""
        if self._block["type"] == "tool_use":
            self._block["input"] = _object_of(self._arguments)
            self._arguments = ""
        return self._of_block("content_block_stop")

    def _usage(self) -> Json:
        """Anthropic counts cached tokens beside the others, not among them."""
        return {
            "input_tokens": self._num_prompt - self._num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self._num_cached,
            "output_tokens": self._num_output,
        }

    # -- events

    def _delta(self, **delta: str) -> bytes:
        return self._of_block("content_block_delta", delta=delta)

    def _of_block(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, index=len(self.message["content"]) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        return named_event(kind, self._encode({"type": kind, **fields}))


def _object_of(text: str) -> Json:
    try:
        return msgspec.json.decode(text, type=Json)
    except (ValueError, RecursionError):
        return {}
