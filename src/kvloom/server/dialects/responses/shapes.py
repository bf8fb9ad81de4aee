"""Answers of OpenAI's /v1/responses: the response object, and the events that build it."""

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from kvloom.contract.errors import ServingError
from kvloom.contract.request import Delta, FinishReason
from kvloom.server.chat.events import ChatEvent, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart
from kvloom.server.chat.output import ChatOutput
from kvloom.server.dialects.ids import new_id
from kvloom.server.dialects.openai.shapes import chat_logprobs
from kvloom.server.dialects.responses.bodies import ResponsesBody, Text
from kvloom.server.dialects.responses.calls import CallItem
from kvloom.server.dialects.responses.tools import Choice, NamedChoice, Tools
from kvloom.server.errors import openai_error
from kvloom.server.http.reply import Reply
from kvloom.server.http.sse import named_event
from kvloom.server.serving.service import GenerationService

_encode = msgspec.json.Encoder().encode
Json = dict[str, Any]


def response_object(id: str, created: int, model: str, body: ResponsesBody, is_kept: bool) -> Json:
    """The response before anything is generated: the request's options, and no output."""
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
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
        "service_tier": "default",
        "store": is_kept,
        "temperature": body.temperature,
        "text": _text(body.text),
        "tool_choice": _choice(body.tool_choice),
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": None,
        **({"conversation": {"id": body.conversation_id}} if body.conversation_id else {}),
    }


def _choice(choice: Choice | None) -> str | Json:
    return _given(choice) if isinstance(choice, NamedChoice) else choice or "auto"


def _text(text: Text | None) -> Json:
    format, verbosity = (None, None) if text is None else (text.format, text.verbosity)
    told: Json = {"format": {"type": "text"} if format is None else _given(format)}
    return told | ({} if verbosity is None else {"verbosity": verbosity})


def _given(format: msgspec.Struct) -> Json:
    return {key: value for key, value in msgspec.to_builtins(format).items() if value is not None}


Event = tuple[str, Json]  # name and data


class ResponseWriter:
    """Builds a response from what is generated, and says so in events; a whole answer is the response that they build.

    An output item is opened by the first of its deltas and closed by another item's or the end. Events are encoded one
    by one as they are made, for they show the response as it is by then.
    """

    def __init__(
        self, response: Json, service: GenerationService, num_prompt: int, output: ChatOutput, tools: Tools
    ) -> None:
        """`response`: as response_object made it. `tools`: what calls are of."""
        self.response, self._tools = response, tools
        self.is_cancelled = False  # then the next event is its last
        self._service, self._output = service, output
        self._num_events = 0
        self._num_prompt = num_prompt
        self._num_output = self._num_cached = 0
        self._item: Json | None = None  # the open item, the last of the output
        self._call: CallItem | None = None  # which it is, if it is one
        self._logprobs: list[Json] = []  # of tokens whose text has not come yet
        self.has_begun = False

    @property
    def has_ended(self) -> bool:
        return bool(self.response["status"] != "in_progress")

    def add(self, choice: int, delta: Delta) -> bytes:
        return b"".join(map(self._encoded, self._events(delta)))

    def end(self) -> bytes:
        """The last event. OpenAI has none for cancelled responses."""
        status = self.response["status"]
        return self._encoded(self._lifecycle(f"response.{'incomplete' if status == 'cancelled' else status}"))

    def error(self, error: ServingError) -> bytes:
        self.fail(error)
        return self.end()

    def fold(self, choice: int, delta: Delta) -> None:
        for _ in self._events(delta):
            pass

    def whole(self) -> Reply:
        return Reply(_encode(self.response))

    def cancel(self) -> None:
        """End the response with what it has."""
        self.is_cancelled = True
        for _ in self._end(FinishReason.ABORT):
            pass

    def fail(self, error: ServingError) -> None:
        told = openai_error(error)["error"]
        self.response["status"] = "failed"
        self.response["error"] = {"code": told["code"] or told["type"], "message": told["message"]}

    def _events(self, delta: Delta) -> Iterator[Event]:
        self._num_output += len(delta.token_ids)
        self._num_cached = max(self._num_cached, delta.num_cached_tokens)
        found = self._output.add(delta)
        if not self.has_begun:
            self.has_begun = True
            yield self._lifecycle("response.created")
            yield self._lifecycle("response.in_progress")
        if delta.logprobs:  # for the text of messages only
            self._logprobs += chat_logprobs(self._service.tokenizer, delta.logprobs)["content"]
        for event in found:
            yield from self._more(event)
            if not isinstance(event, TextDelta):
                self._logprobs = []
        if delta.finish_reason:
            yield from self._end(delta.finish_reason)

    def _more(self, event: ChatEvent) -> Iterator[Event]:
        match event:
            case TextDelta(text):
                yield from self._open("message")
                yield self._text(text)
            case ReasoningDelta(text):
                yield from self._open("reasoning")
                self._part()["text"] += text
                yield self._of_part("response.reasoning_text.delta", delta=text)
            case ToolCallStart(_, name):
                call = CallItem(self._tools.called(name))
                yield from self._open_item(call.item)
                self._call = call
            case ToolCallArguments(_, text):
                assert self._call is not None, "arguments before their call"
                for kind, said in self._call.add(text):
                    yield self._of_call(kind, **said)

    def _end(self, reason: FinishReason) -> Iterator[Event]:
        """Close open items; the response has its final status then. An answer without output is an empty message."""
        is_cut = reason is FinishReason.LENGTH
        status = "incomplete" if is_cut or self.is_cancelled else "completed"
        if not self.response["output"]:
            yield from self._open("message")
        if self._logprobs and self._item is not None and self._item["type"] == "message":
            yield self._text("")
        yield from self._close(status)
        self.response["status"] = "cancelled" if self.is_cancelled else status
        self.response["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        self.response["usage"] = self._usage()

    # -- items and their parts

    def _open(self, kind: Literal["message", "reasoning"]) -> Iterator[Event]:
        """The item that a delta of this kind belongs to, with its one part: the open one, or a new one."""
        if self._item is not None and self._item["type"] == kind:
            return
        id, status = new_id(), "in_progress"
        part: Json = {"type": "reasoning_text", "text": ""}
        item: Json = {"id": f"rs_{id}", "type": kind, "status": status, "summary": [], "content": []}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"id": f"msg_{id}", "type": kind, "status": status, "role": "assistant", "content": []}
        yield from self._open_item(item)
        item["content"].append(part)
        yield self._of_part("response.content_part.added", part=part)

    def _open_item(self, item: Json) -> Iterator[Event]:
        yield from self._close("completed")
        self._item = item
        self.response["output"].append(item)
        yield self._of_item("response.output_item.added")

    def _text(self, delta: str) -> Event:
        part, logprobs = self._part(), self._logprobs
        part["text"] += delta
        part["logprobs"] += logprobs
        self._logprobs = []
        return self._of_part("response.output_text.delta", delta=delta, logprobs=logprobs)

    def _close(self, status: str) -> Iterator[Event]:
        """The open item, if there is one."""
        item = self._item
        if item is None:
            return
        if self._call is not None:
            for kind, said in self._call.end():
                yield self._of_call(kind, **said)
        else:
            part = self._part()
            told = {"text": part["text"]} | ({"logprobs": part["logprobs"]} if item["type"] == "message" else {})
            yield self._of_part(f"response.{part['type']}.done", **told)
            yield self._of_part("response.content_part.done", part=part)
        item["status"] = status
        yield self._of_item("response.output_item.done")
        self._item = self._call = None

    def _part(self) -> Json:
        assert self._item is not None
        part: Json = self._item["content"][-1]
        return part

    # -- events

    def _of_part(self, kind: str, **fields: Any) -> Event:
        return self._of_call(kind, content_index=0, **fields)

    def _of_call(self, kind: str, **fields: Any) -> Event:
        assert self._item is not None
        return kind, {"item_id": self._item["id"], "output_index": len(self.response["output"]) - 1, **fields}

    def _of_item(self, kind: str) -> Event:
        return kind, {"output_index": len(self.response["output"]) - 1, "item": self._item}

    def _lifecycle(self, kind: str) -> Event:
        return kind, {"response": self.response}

    def _encoded(self, event: Event) -> bytes:
        kind, said = event
        number, self._num_events = self._num_events, self._num_events + 1
        return named_event(kind, _encode({"type": kind, "sequence_number": number, **said}))

    def _usage(self) -> Json:
        num_reasoning = self._output.num_reasoning_tokens
        return {
            "input_tokens": self._num_prompt,
            "input_tokens_details": {"cached_tokens": self._num_cached, "cache_write_tokens": 0},
            "output_tokens": self._num_output,
            "output_tokens_details": {"reasoning_tokens": num_reasoning},
            "total_tokens": self._num_prompt + self._num_output,
        }
