"""Answers of OpenAI's /v1/responses: the response object, and the events that it is built from."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any, Literal

import msgspec

from kvloom.engine.errors import ServingError
from kvloom.engine.request import FinishReason
from kvloom.server.api.responses_bodies import ResponsesBody
from kvloom.server.chat_events import ChatEvent, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart
from kvloom.server.errors import openai_error
from kvloom.server.sse import named_event

Json = dict[str, Any]


def response_object(id: str, created: int, model: str, body: ResponsesBody) -> Json:
    """The response before anything is generated: what was asked for, and nothing put out."""
    format = None if body.text is None else body.text.format
    reasoning = body.reasoning
    return {
        "id": id,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": {"type": "text"} if format is None else _given(format)},
        "tool_choice": "auto" if body.tool_choice is None else msgspec.to_builtins(body.tool_choice),
        "tools": msgspec.to_builtins(body.tools or []),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": None,
    }


def _given(format: msgspec.Struct) -> Json:
    return {key: value for key, value in msgspec.to_builtins(format).items() if value is not None}


class ResponseWriter:
    """Builds a response from what is generated, and says so in events. Every method returns the events it made.

    An output item is opened by the first of its deltas and closed by another item's or the end.
    """

    def __init__(self, response: Json, num_prompt: int, new_id: Callable[[], str]) -> None:
        self.response = response
        self._new_id = new_id
        self._sequence = itertools.count()
        self._encode = msgspec.json.Encoder().encode
        self._num_prompt = num_prompt
        self._num_output = self._num_cached = self._num_reasoning = 0
        self._item: Json | None = None  # the one that is open, the last of the output
        self._logprobs: list[Json] = []  # of tokens whose text has not come yet

    def begin(self) -> bytes:
        return self._lifecycle("response.created") + self._lifecycle("response.in_progress")

    def count(self, num_tokens: int, num_cached: int, num_reasoning: int) -> None:
        """Output tokens more; prompt tokens that were cached; tokens of reasoning so far."""
        self._num_output += num_tokens
        self._num_cached = max(self._num_cached, num_cached)
        self._num_reasoning = num_reasoning

    def add(self, events: Iterable[ChatEvent], logprobs: Iterable[Json] = ()) -> bytes:
        """More of the answer; log-probabilities of its new tokens, which are told of a message's text only."""
        self._logprobs += logprobs
        chunk = b""
        for event in events:
            match event:
                case TextDelta(text):
                    chunk += self._open("message") + self._text(text)
                case ReasoningDelta(text):
                    chunk += self._open("reasoning")
                    self._part()["text"] += text
                    chunk += self._of_part("response.reasoning_text.delta", delta=text)
                case ToolCallStart(_, name):
                    chunk += self._open_item(
                        {"id": f"fc_{self._new_id()}", "type": "function_call", "status": "in_progress"}
                        | {"call_id": f"call_{self._new_id()}", "name": name, "arguments": ""}
                    )
                case ToolCallArguments(_, text):
                    assert self._item is not None, "arguments before their call"
                    self._item["arguments"] += text
                    chunk += self._of_call("response.function_call_arguments.delta", delta=text)
            if not isinstance(event, TextDelta):
                self._logprobs = []
        return chunk

    def end(self, reason: FinishReason) -> bytes:
        """Close what is open. An answer of nothing is an empty message."""
        is_cut = reason is FinishReason.LENGTH
        status = "incomplete" if is_cut else "completed"
        chunk = b"" if self.response["output"] else self._open("message")
        if self._logprobs and self._item is not None and self._item["type"] == "message":
            chunk += self._text("")
        chunk += self._close(status)
        self.response["status"] = status
        self.response["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        self.response["usage"] = self._usage()
        return chunk + self._lifecycle(f"response.{status}")

    def failed(self, error: ServingError) -> bytes:
        told = openai_error(error)["error"]
        self.response["status"] = "failed"
        self.response["error"] = {"code": told["code"] or told["type"], "message": told["message"]}
        return self._lifecycle("response.failed")

    # -- items and their parts

    def _open(self, kind: Literal["message", "reasoning"]) -> bytes:
        """The item that a delta of this kind belongs to, with its one part: the open one, or a new one."""
        if self._item is not None and self._item["type"] == kind:
            return b""
        id, status = self._new_id(), "in_progress"
        part: Json = {"type": "reasoning_text", "text": ""}
        item: Json = {"id": f"rs_{id}", "type": kind, "status": status, "summary": [], "content": []}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"id": f"msg_{id}", "type": kind, "status": status, "role": "assistant", "content": []}
        chunk = self._open_item(item)
        item["content"].append(part)
        return chunk + self._of_part("response.content_part.added", part=part)

    def _open_item(self, item: Json) -> bytes:
        chunk = self._close("completed")
        self._item = item
        self.response["output"].append(item)
        return chunk + self._of_item("response.output_item.added")

    def _text(self, delta: str) -> bytes:
        part, logprobs = self._part(), self._logprobs
        part["text"] += delta
        part["logprobs"] += logprobs
        self._logprobs = []
        return self._of_part("response.output_text.delta", delta=delta, logprobs=logprobs)

    def _close(self, status: str) -> bytes:
        """The open item, if there is one."""
        item = self._item
        if item is None:
            return b""
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            chunk = self._of_call("response.function_call_arguments.done", **done)
        else:
            part = self._part()
            told = {"text": part["text"]} | ({"logprobs": part["logprobs"]} if item["type"] == "message" else {})
            chunk = self._of_part(f"response.{part['type']}.done", **told)
            chunk += self._of_part("response.content_part.done", part=part)
        item["status"] = status
        chunk += self._of_item("response.output_item.done")
        self._item = None
        return chunk

    def _part(self) -> Json:
        assert self._item is not None
        part: Json = self._item["content"][-1]
        return part

    # -- events

    def _of_part(self, kind: str, **fields: Any) -> bytes:
        return self._of_call(kind, content_index=0, **fields)

    def _of_call(self, kind: str, **fields: Any) -> bytes:
        assert self._item is not None
        return self._event(kind, item_id=self._item["id"], output_index=len(self.response["output"]) - 1, **fields)

    def _of_item(self, kind: str) -> bytes:
        return self._event(kind, output_index=len(self.response["output"]) - 1, item=self._item)

    def _lifecycle(self, kind: str) -> bytes:
        return self._event(kind, response=self.response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        return named_event(kind, self._encode({"type": kind, "sequence_number": next(self._sequence), **fields}))

    def _usage(self) -> Json:
        return {
            "input_tokens": self._num_prompt,
            "input_tokens_details": {"cached_tokens": self._num_cached, "cache_write_tokens": 0},
            "output_tokens": self._num_output,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning},
            "total_tokens": self._num_prompt + self._num_output,
        }
