"""Answers of OpenAI's /v1/responses: the response object, and the events that it is built from."""

import itertools
from collections.abc import Callable
from typing import Any

import msgspec

from kvloom.engine.errors import ServingError
from kvloom.engine.request import FinishReason
from kvloom.server.api.responses_bodies import ResponsesBody
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
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": body.tools or [],
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

    The parts of an output item are opened by the first of their deltas and closed by another item's or the end.
    """

    def __init__(self, response: Json, num_prompt: int, new_id: Callable[[], str]) -> None:
        self.response = response
        self._new_id = new_id
        self._sequence = itertools.count()
        self._encode = msgspec.json.Encoder().encode
        self._num_prompt = num_prompt
        self._num_output = self._num_cached = 0
        self._item: Json | None = None  # the one that is open, the last of the output

    def begin(self) -> bytes:
        return self._lifecycle("response.created") + self._lifecycle("response.in_progress")

    def count(self, num_tokens: int, num_cached: int) -> None:
        """Output tokens more; prompt tokens that were cached."""
        self._num_output += num_tokens
        self._num_cached = max(self._num_cached, num_cached)

    def text(self, delta: str, logprobs: list[Json]) -> bytes:
        """More of the message."""
        events = b""
        if self._item is None:
            events = self._open_message()
        part = self._part()
        part["text"] += delta
        part["logprobs"] += logprobs
        return events + self._of_part("response.output_text.delta", delta=delta, logprobs=logprobs)

    def end(self, reason: FinishReason) -> bytes:
        """Close what is open. An answer of no text is an empty message."""
        is_cut = reason is FinishReason.LENGTH
        status = "incomplete" if is_cut else "completed"
        events = (self._open_message() if self._item is None else b"") + self._close(status)
        self.response["status"] = status
        self.response["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        self.response["usage"] = self._usage()
        return events + self._lifecycle(f"response.{status}")

    def failed(self, error: ServingError) -> bytes:
        told = openai_error(error)["error"]
        self.response["status"] = "failed"
        self.response["error"] = {"code": told["code"] or told["type"], "message": told["message"]}
        return self._lifecycle("response.failed")

    # -- parts

    def _open_message(self) -> bytes:
        self._item = {
            "id": f"msg_{self._new_id()}",
            "type": "message",
            "status": "in_progress",
            "role": "assistant",
            "content": [],
        }
        self.response["output"].append(self._item)
        events = self._of_item("response.output_item.added")
        self._item["content"].append({"type": "output_text", "text": "", "annotations": [], "logprobs": []})
        return events + self._of_part("response.content_part.added", part=self._part())

    def _close(self, status: str) -> bytes:
        item, part = self._item, self._part()
        assert item is not None
        events = self._of_part("response.output_text.done", text=part["text"], logprobs=part["logprobs"])
        events += self._of_part("response.content_part.done", part=part)
        item["status"] = status
        events += self._of_item("response.output_item.done")
        self._item = None
        return events

    def _part(self) -> Json:
        assert self._item is not None
        part: Json = self._item["content"][-1]
        return part

    # -- events

    def _of_part(self, kind: str, **fields: Any) -> bytes:
        assert self._item is not None
        place = len(self.response["output"]) - 1
        return self._event(kind, item_id=self._item["id"], output_index=place, content_index=0, **fields)

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
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self._num_prompt + self._num_output,
        }
