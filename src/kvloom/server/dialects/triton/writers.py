"""Answers of Triton's generate extension, whole or streamed, and of infer."""

from typing import Any

import msgspec

from kvloom.contract.errors import ServingError
from kvloom.contract.request import Delta, FinishReason
from kvloom.server.dialects.parameters import finish_name
from kvloom.server.dialects.triton.bodies import Infer, infer_answer
from kvloom.server.errors import tgi_error
from kvloom.server.http.job import Folding, WholeWriter
from kvloom.server.http.reply import Reply
from kvloom.server.observe.timing import Timing
from kvloom.server.serving.generation import Generation
from kvloom.server.serving.service import GenerationService

BINARY = "application/octet-stream"
Json = dict[str, Any]
_encode = msgspec.json.Encoder().encode


class TextWriter(Folding):
    """A stream has the text that each step adds. `head` begins every part of the answer; `timing` is the job's."""

    def __init__(
        self, service: GenerationService, generation: Generation, head: Json, has_details: bool, timing: Timing
    ) -> None:
        super().__init__(generation)
        self._service, self._head, self._has_details, self._timing = service, head, has_details, timing
        self._num_tokens = 0

    def add(self, choice: int, delta: Delta) -> bytes:
        self._num_tokens += len(delta.token_ids)
        return _event(self._told(delta.text, delta.finish_reason))

    def error(self, error: ServingError) -> bytes:
        return _event(tgi_error(error))

    def whole(self) -> Reply:
        [answer] = self.answers
        self._num_tokens = len(answer.token_ids)
        return Reply(_encode(self._told(answer.text, answer.finish_reason)))

    def _told(self, text: str, finish_reason: FinishReason | None) -> Json:
        told = {**self._head, "text_output": text}
        return {**told, "details": self._details(finish_reason)} if self._has_details else told

    def _details(self, finish_reason: FinishReason | None) -> Json:
        """Times in ms; batch_size is that of the last step."""
        first_s, num_tokens = self._timing.first_token_s, self._num_tokens
        details: Json = {} if finish_reason is None else {"finish_reason": finish_name(finish_reason)}
        return {
            **details,
            "generated_tokens": num_tokens,
            "first_token_cost": None if first_s is None else round(first_s * 1e3, 3),
            "decode_cost": None if num_tokens < 2 else round(self._timing.decode_s * 1e3, 3),
            "batch_size": max(1, self._service.engine.stats().num_running),
            "queue_wait_time": round(self._timing.queue_s * 1e3, 3),
        }


class InferWriter(WholeWriter):
    """Tokens, as one tensor."""

    def __init__(self, generation: Generation, head: Json, asked: Infer, is_input_echoed: bool) -> None:
        super().__init__(generation)
        self._head, self._is_input_echoed = head, is_input_echoed
        self._name, self._is_binary = asked.output_name, asked.is_binary_wanted

    def whole(self) -> Reply:
        [answer] = self.answers
        ids = [*answer.prompt_ids, *answer.token_ids] if self._is_input_echoed else answer.token_ids
        body, headers = infer_answer(self._head, self._name, ids, self._is_binary)
        return Reply(body, media_type=BINARY if self._is_binary else "application/json", headers=headers)


def _event(told: Json) -> bytes:
    """Without a space after the colon: clients of this dialect look for `data:{`."""
    return b"data:" + _encode(told) + b"\n\n"
