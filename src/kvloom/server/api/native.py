"""The seed's own text and token routes: /infer, /infer_token (seed 001, 3.3.2.5.3)."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from kvloom.engine.errors import ServingError
from kvloom.server.api.parameters import NATIVE, Parameters, finish_name, generation_of, invalid, prompt_of
from kvloom.server.api.tgi import error_event
from kvloom.server.body import decode_body
from kvloom.server.errors import ErrorReply, tgi_reply
from kvloom.server.generation import Generation, GenerationService
from kvloom.server.models import Models
from kvloom.server.reply import Call, Endpoint, Events, Reply
from kvloom.server.sse import MEDIA_TYPE, event


class TextInferBody(msgspec.Struct, kw_only=True):
    inputs: str
    stream: bool | None = False
    parameters: Parameters | None = None


class TokenInferBody(msgspec.Struct, kw_only=True):
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
            Endpoint("POST", "/infer", self.infer, "Text to text", (TextInferBody,), True, is_streaming=True),
            Endpoint(
                "POST", "/infer_token", self.infer_token, "Tokens to text", (TokenInferBody,), True, is_streaming=True
            ),
        )

    def error_reply(self, error: ServingError) -> ErrorReply:
        return tgi_reply(error)

    async def infer(self, call: Call) -> Reply:
        """POST /infer."""
        body = decode_body(_infer_decoder, call.body)
        ids = prompt_of(self._models.default, body.inputs, self._models.options.max_input_chars)
        return await self._reply(ids, body, call)

    async def infer_token(self, call: Call) -> Reply:
        """POST /infer_token: the prompt as token ids."""
        body = decode_body(_token_decoder, call.body)
        if not body.input_id:
            raise invalid("`input_id` cannot be empty")
        return await self._reply(tuple(body.input_id), body, call)

    async def _reply(self, ids: tuple[int, ...], body: TextInferBody | TokenInferBody, call: Call) -> Reply:
        params = body.parameters or Parameters()
        service = self._models.of_adapter(params.adapter_id)
        if (params.best_of or 1) > 1:
            raise invalid("`best_of` != 1 is not allowed for this endpoint")
        generation = generation_of(service, call.headers["x-request-id"], ids, params, NATIVE, tenant=call.tenant)
        if body.stream:
            events = await Events.begin(_events(service, generation, bool(params.details)), error_event)
            return Reply(media_type=MEDIA_TYPE, events=events)
        [answer] = await service.collect(generation)
        reply: dict[str, Any] = {"generated_text": answer.text}
        if params.details:
            reply["details"] = {
                "finish_reason": finish_name(answer.finish_reason),
                "generated_tokens": len(answer.token_ids),
                "seed": answer.seed,
            }
        return Reply(msgspec.json.encode(reply))


async def _events(service: GenerationService, generation: Generation, has_details: bool) -> AsyncGenerator[bytes]:
    """One event a token, under both of its names; the last one's text is null and the whole text beside it."""
    text, num_tokens = "", 0
    async with aclosing(service.stream(generation)) as deltas:
        async for _, delta in deltas:
            text += delta.text
            num_tokens += len(delta.token_ids)
            is_last = delta.finish_reason is not None
            token = {"id": delta.token_ids[0] if delta.token_ids else None, "text": None if is_last else delta.text}
            item: dict[str, Any] = {}
            if is_last:
                item["generated_text"] = text
            if is_last and has_details:
                details = {"finish_reason": finish_name(delta.finish_reason), "generated_tokens": num_tokens}
                item["details"] = {**details, "seed": delta.seed}
            yield event(msgspec.json.encode({**item, "token": token, "tokens": token}))
