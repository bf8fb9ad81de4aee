"""Answers of Ollama's /api/chat and /api/generate: lines of JSON, and the whole answer folded of the same lines."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from kvloom.contract.errors import ServingError
from kvloom.contract.request import Delta
from kvloom.server.chat.events import ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart
from kvloom.server.dialects.ids import new_id
from kvloom.server.dialects.ollama.bodies import Asked
from kvloom.server.dialects.openai.shapes import chat_logprobs, finish_name
from kvloom.server.errors import ollama_error
from kvloom.server.http.reply import Reply
from kvloom.server.observe.timing import Timing
from kvloom.server.serving.service import GenerationService

_encode = msgspec.json.Encoder().encode
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Heading:
    """The fields of every line of an answer."""

    kind: Literal["chat", "generate"]
    model: str

    def line(self, now_s: float, text: str = "", thinking: str = "", calls: Iterable[Json] = ()) -> Json:
        part: Json = {"role": "assistant", "content": text} if self.kind == "chat" else {"response": text}
        if thinking:
            part["thinking"] = thinking
        if calls:
            part["tool_calls"] = list(calls)
        part = {"message": part} if self.kind == "chat" else part
        return {"model": self.model, "created_at": time_text(now_s), **part, "done": False}

    def empty(self, now_s: float, reason: Literal["load", "unload"]) -> bytes:
        """The answer of a request that asks for nothing."""
        return _encode({**self.line(now_s), "done": True, "done_reason": reason})


def time_text(seconds: float) -> str:
    """A time since the epoch as the protocol writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


class AnswerWriter:
    """Lines of JSON, and the whole answer, which is all lines in one."""

    def __init__(self, heading: Heading, service: GenerationService, asked: Asked, timing: Timing) -> None:
        """`timing`: the job's."""
        self._heading, self._service, self._asked, self._timing = heading, service, asked, timing
        self._context = list(asked.prompt_ids) if asked.has_context else None
        self._num_output = 0
        self._call: list[str] = []  # name of the open call and the pieces of its arguments
        self._num_calls = 0
        self._whole: Json = {"text": "", "thinking": "", "calls": [], "logprobs": []}
        self._last: Json = {}

    def add(self, choice: int, delta: Delta) -> bytes:
        return b"".join([_encode(line) + b"\n" for line in self._lines(delta)])

    def end(self) -> bytes:
        return b""

    def error(self, error: ServingError) -> bytes:
        return _encode(ollama_error(error)) + b"\n"

    def fold(self, choice: int, delta: Delta) -> None:
        self._lines(delta)

    def whole(self) -> Reply:
        whole = self._whole
        logprobs = {"logprobs": whole["logprobs"]} if whole["logprobs"] else {}
        line = self._heading.line(self._timing.now_s, whole["text"], whole["thinking"], whole["calls"])
        return Reply(_encode({**line, **self._last, **logprobs}))

    def _lines(self, delta: Delta) -> list[Json]:
        """The line for a delta, if any, and the last one. A call is sent when its arguments are complete."""
        self._num_output += len(delta.token_ids)
        if self._context is not None:
            self._context += delta.token_ids
        text = thinking = ""
        calls: list[Json] = []
        for event in self._asked.output.add(delta):
            match event:
                case TextDelta(more):
                    text += more
                case ReasoningDelta(more):
                    thinking += more
                case ToolCallStart(_, name):
                    calls += self._close()
                    self._call = [name]
                case ToolCallArguments(_, more):
                    self._call.append(more)
        if delta.finish_reason:
            calls += self._close()
        logprobs = chat_logprobs(self._service.tokenizer, delta.logprobs)["content"] if delta.logprobs else []
        lines = []
        if text or thinking or calls or logprobs:
            self._whole["text"] += text
            self._whole["thinking"] += thinking
            self._whole["calls"] += calls
            self._whole["logprobs"] += logprobs
            line = self._heading.line(self._timing.now_s, text, thinking, calls)
            lines.append({**line, **({"logprobs": logprobs} if logprobs else {})})
        return [*lines, self._end(delta)] if delta.finish_reason else lines

    def _end(self, delta: Delta) -> Json:
        """The last line. Durations are in ns; the model was loaded before."""
        self._last = {
            "done": True,
            "done_reason": finish_name(delta.finish_reason),
            "total_duration": _ns(self._timing.age_s),
            "load_duration": 0,
            "prompt_eval_count": len(self._asked.prompt_ids),
            "prompt_eval_duration": _ns(self._timing.first_token_s or 0.0),
            "eval_count": self._num_output,
            "eval_duration": _ns(self._timing.decode_s),
        }
        if self._context is not None:
            self._last["context"] = self._context
        return {**self._heading.line(self._timing.now_s), **self._last}

    def _close(self) -> list[Json]:
        """The open call. Arguments that the end cut off are no object, and the call is left out."""
        if not self._call:
            return []
        name, *pieces = self._call
        self._call = []
        try:
            arguments = msgspec.json.decode("".join(pieces) or "{}", type=Json)
        except (ValueError, RecursionError):
            return []
        index, self._num_calls = self._num_calls, self._num_calls + 1
        function = {"index": index, "name": name, "arguments": arguments}
        return [{"id": f"call_{new_id()[:8]}", "function": function}]


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
