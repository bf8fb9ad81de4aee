"""The documented server's own text and token routes: /infer, /infer_token (spec 3.3.2.5.3)."""

from typing import Any

import msgspec

from kvloom.contract.errors import ServingError
from kvloom.contract.request import Delta
from kvloom.server.dialects.constraints import Constraints
from kvloom.server.dialects.parameters import (
    NATIVE,
    Parameters,
    Question,
    finish_name,
    generation_of,
    invalid,
    prompt_of,
)
from kvloom.server.dialects.tgi.writer import error_event
from kvloom.server.errors import ErrorReply, tgi_reply
from kvloom.server.http.body import decode_body
from kvloom.server.http.job import Folding, Job
from kvloom.server.http.reply import Endpoint, HttpRequest, Reply, job_route
from kvloom.server.http.sse import event
from kvloom.server.serving.generation import Generation
from kvloom.server.serving.registry import Models

_encode = msgspec.json.Encoder().encode


class TextInferBody(Constraints, kw_only=True):
    inputs: str
    stream: bool | None = False
    parameters: Parameters | None = None


class TokenInferBody(Constraints, kw_only=True):
    input_id: list[int]
    stream: bool | None = False
    parameters: Parameters | None = None


_infer_decoder = msgspec.json.Decoder(TextInferBody)
_token_decoder = msgspec.json.Decoder(TokenInferBody)


class Native:
    def __init__(self, models: Models) -> None:
        self._models = models

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        return (
            job_route("/infer", self.infer, "Text to text", TextInferBody),
            job_route("/infer_token", self.infer_token, "Tokens to text", TokenInferBody),
        )

    def error_reply(self, error: ServingError) -> ErrorReply:
        return tgi_reply(error)

    def infer(self, request: HttpRequest) -> Job:
        """POST /infer."""
        body = decode_body(_infer_decoder, request.body)
        params = body.parameters or Parameters()
        ids = prompt_of(self._models.default, body.inputs, self._models.options.max_input_chars, params)
        return self._job(ids, body, request)

    def infer_token(self, request: HttpRequest) -> Job:
        """POST /infer_token: the prompt as token ids."""
        body = decode_body(_token_decoder, request.body)
        if not body.input_id:
            raise invalid("`input_id` cannot be empty")
        return self._job(tuple(body.input_id), body, request)

    def _job(self, ids: tuple[int, ...], body: TextInferBody | TokenInferBody, request: HttpRequest) -> Job:
        body.refuse_outside()
        params = body.parameters or Parameters()
        service = self._models.of_adapter(params.adapter_id)
        question = Question(request.headers["x-request-id"], ids, request.tenant)
        generation = generation_of(service, question, params, NATIVE)
        return Job(service, generation, NativeWriter(generation, bool(params.details)), bool(body.stream))


class NativeWriter(Folding):
    """Streamed, a token is an event and has both of its names; the last has no text, but the whole one beside it."""

    def __init__(self, generation: Generation, has_details: bool) -> None:
        super().__init__(generation)
        self._has_details = has_details

    def add(self, choice: int, delta: Delta) -> bytes:
        self.fold(choice, delta)
        is_last = delta.finish_reason is not None
        token = {"id": delta.token_ids[0] if delta.token_ids else None, "text": None if is_last else delta.text}
        item = self._end() if is_last else {}
        return event(_encode({**item, "token": token, "tokens": token}))

    def error(self, error: ServingError) -> bytes:
        return error_event(error)

    def whole(self) -> Reply:
        return Reply(_encode(self._end()))

    def _end(self) -> dict[str, Any]:
        """The whole text, and how it came to be."""
        [answer] = self.answers
        told: dict[str, Any] = {"generated_text": answer.text}
        if self._has_details:
            told["details"] = {
                "finish_reason": finish_name(answer.finish_reason),
                "generated_tokens": len(answer.token_ids),
                "seed": self.generation.params.seed if answer.seed is None else answer.seed,
            }
        return told
