"""Answers of Anthropic's /v1/messages: the message, and the events that build it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jiter
import msgspec

from kvloom.contract.errors import ServingError
from kvloom.contract.request import Delta, FinishReason
from kvloom.server.chat.events import ChatEvent, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart
from kvloom.server.chat.output import ChatOutput
from kvloom.server.dialects.ids import new_id
from kvloom.server.errors import anthropic_error
from kvloom.server.http.reply import Reply
from kvloom.server.http.sse import named_event

_encode = msgspec.json.Encoder().encode
Json = dict[str, Any]
_STOP_REASONS = {
    FinishReason.EOS: "end_turn",
    FinishReason.STOP: "stop_sequence",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.ABORT: "end_turn",
}


Event = tuple[str, Json]  # name and data


@dataclass(frozen=True, slots=True)
class Told:
    """What a message says of its request. `max_tokens`: a shorter answer that was cut filled the context."""

    num_prompt: int
    max_tokens: int = 0
    omits_thinking: bool = False
    is_empty: bool = False  # the prompt alone was wanted


class MessageWriter:
    """Builds a message from what is generated, and says so in events; a whole answer is the message that they build.

    A block is opened by the first of its deltas and closed by another block's or the end. Events are encoded one by
    one as they are made, for they show the message as it is by then.
    """

    def __init__(self, id: str, model: str, told: Told, output: ChatOutput) -> None:
        self.message: Json = {
            "id": id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._output, self._told = output, told
        self._num_output = self._num_cached = 0
        self._arguments = ""  # JSON text of the open tool_use
        self._has_begun = False

    def add(self, choice: int, delta: Delta) -> bytes:
        return b"".join([named_event(kind, _encode({"type": kind, **said})) for kind, said in self._events(delta)])

    def end(self) -> bytes:
        return b""

    def error(self, error: ServingError) -> bytes:
        return named_event("error", _encode(anthropic_error(error)))

    def fold(self, choice: int, delta: Delta) -> None:
        for _ in self._events(delta):
            pass

    def whole(self) -> Reply:
        return Reply(_encode(self.message))

    def _events(self, delta: Delta) -> Iterator[Event]:
        if self._told.is_empty:
            is_last = delta.finish_reason is not None
            delta = Delta(
                delta.request_id,
                finish_reason=FinishReason.LENGTH if is_last else None,
                num_cached_tokens=delta.num_cached_tokens,
            )
        self._num_output += len(delta.token_ids)
        self._num_cached = max(self._num_cached, delta.num_cached_tokens)
        if not self._has_begun:
            self._has_begun = True
            yield "message_start", {"message": self.message | {"usage": self._usage()}}
            yield "ping", {}
        for event in self._output.add(delta):
            yield from self._part(event)
        if delta.finish_reason:
            yield from self._end(delta.finish_reason, delta.stop_reason)

    def _part(self, event: ChatEvent) -> Iterator[Event]:
        """More of the answer."""
        match event:
            case TextDelta(text):
                yield from self._open({"type": "text", "text": ""})
                self._block["text"] += text
                yield self._delta(type="text_delta", text=text)
            case ReasoningDelta(text):
                yield from self._open({"type": "thinking", "thinking": "", "signature": ""})
                if not self._told.omits_thinking:
                    self._block["thinking"] += text
                    yield self._delta(type="thinking_delta", thinking=text)
            case ToolCallStart(_, name):
                id = f"toolu_{new_id()}"
                yield from self._open({"type": "tool_use", "id": id, "name": name, "input": {}}, is_new=True)
            case ToolCallArguments(_, text):
                self._arguments += text
                yield self._delta(type="input_json_delta", partial_json=text)

    def _end(self, reason: FinishReason, stop: str | int | None) -> Iterator[Event]:
        """`stop`: the stop sequence that ended it. A call was the aim of an answer that was not cut."""
        has_calls = any(block["type"] == "tool_use" for block in self.message["content"])
        name = "tool_use" if has_calls and reason is FinishReason.EOS else _STOP_REASONS[reason]
        if reason is FinishReason.LENGTH and self._num_output < self._told.max_tokens:
            name = "model_context_window_exceeded"
        said = {
            "stop_reason": name,
            "stop_sequence": stop if isinstance(stop, str) else None,
        }
        yield from self._close()
        self.message |= said | {"usage": self._usage()}
        yield "message_delta", {"delta": said, "usage": self._usage()}
        yield "message_stop", {}

    # -- blocks

    @property
    def _block(self) -> Json:
        """The open one."""
        block: Json = self.message["content"][-1]
        return block

    def _open(self, block: Json, is_new: bool = False) -> Iterator[Event]:
        """Unless one of its type is open, and no new one is wanted."""
        blocks = self.message["content"]
        if blocks and self._block["type"] == block["type"] and not is_new:
            return
        yield from self._close()
        blocks.append(block)
        yield self._of_block("content_block_start", content_block=block)

    def _close(self) -> Iterator[Event]:
        """The open block, if there is one. Of arguments that the end cut off what is whole is kept."""
        if not self.message["content"]:
            return
        if self._block["type"] == "tool_use":
            self._block["input"] = object_so_far(self._arguments)
            self._arguments = ""
        yield self._of_block("content_block_stop")

    def _delta(self, **delta: str) -> Event:
        return self._of_block("content_block_delta", delta=delta)

    def _of_block(self, kind: str, **fields: Any) -> Event:
        return kind, {"index": len(self.message["content"]) - 1, **fields}

    def _usage(self) -> Json:
        """Anthropic counts cached tokens beside the others, not among them."""
        num_thinking = self._output.num_reasoning_tokens
        return {
            "input_tokens": self._told.num_prompt - self._num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self._num_cached,
            "output_tokens": self._num_output,
            **({"output_tokens_details": {"thinking_tokens": num_thinking}} if num_thinking else {}),
        }


def object_so_far(text: str) -> dict[str, Any]:
    """The JSON object that `text` is or begins, without a string or word that is cut, read
    with the parser of Anthropic's client; {} where it is none."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (ValueError, RecursionError):
        pass
    try:
        found = jiter.from_json(text.encode(), partial_mode=True, allow_inf_nan=False)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
