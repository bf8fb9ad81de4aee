"""OpenAI's /v1/responses over the same chat: stateless, whole or as its sequence of events."""

import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec

from kvloom.engine.errors import ServingError
from kvloom.engine.request import FinishReason, TokenLogprob
from kvloom.server.api.openai_shapes import chat_logprobs
from kvloom.server.api.responses_bodies import ResponsesBody
from kvloom.server.api.responses_shapes import ResponseWriter, response_object
from kvloom.server.body import decode_body
from kvloom.server.chat_events import TextDelta
from kvloom.server.chat_output import ChatOutput
from kvloom.server.errors import ErrorReply, openai_reply
from kvloom.server.generation import Generation, GenerationService
from kvloom.server.models import Models
from kvloom.server.reply import Call, Endpoint, Events, Reply
from kvloom.server.sse import MEDIA_TYPE

_decoder = msgspec.json.Decoder(ResponsesBody)


class Responses:
    """`now` and `new_id` are injected for golden files."""

    def __init__(
        self,
        models: Models,
        now: Callable[[], float] = time.time,
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
    ) -> None:
        self._models, self._now, self._new_id = models, now, new_id

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        answer = self.respond
        return (Endpoint("POST", "/v1/responses", answer, "Responses", (ResponsesBody,), True, is_streaming=True),)

    def error_reply(self, error: ServingError) -> ErrorReply:
        return openai_reply(error)

    async def respond(self, call: Call) -> Reply:
        """Raises ServingError before anything is answered."""
        body = decode_body(_decoder, call.body)
        service = self._models.choose(body.model)
        body.check()
        text = service.tokenizer.apply_chat_template(
            body.conversation_messages(), add_generation_prompt=True, **body.template_values()
        )
        ids = tuple(service.tokenizer.encode(text, add_special_tokens=False))
        params = body.params(self._models.options.default_max_tokens)
        id = f"resp_{self._new_id()}"
        generation = Generation(id, (ids,), params, priority=body.priority or 0, tenant=call.tenant)
        service.check(generation, "input")
        response = response_object(id, int(self._now()), service.name, body)
        writer = ResponseWriter(response, len(ids), self._new_id)
        if body.stream:
            events = _events(service, generation, writer)
            return Reply(media_type=MEDIA_TYPE, events=await Events.begin(events, writer.failed))
        [answer] = await service.collect(generation)
        writer.count(len(answer.token_ids), answer.num_cached_tokens, 0)
        writer.add([TextDelta(answer.text)], _logprobs(service, tuple(answer.logprobs)))
        writer.end(answer.finish_reason or FinishReason.ABORT)
        return Reply(msgspec.json.encode(response))


async def _events(service: GenerationService, generation: Generation, writer: ResponseWriter) -> AsyncGenerator[bytes]:
    """The first comes with the first token, so that an error before it has a status."""
    output, is_begun = ChatOutput(), False
    async with aclosing(service.stream(generation)) as deltas:
        async for _, delta in deltas:
            found = output.add(delta)
            writer.count(len(delta.token_ids), delta.num_cached_tokens, output.num_reasoning_tokens)
            chunk = b"" if is_begun else writer.begin()
            is_begun = True
            chunk += writer.add(found, _logprobs(service, delta.logprobs))
            if delta.finish_reason:
                chunk += writer.end(delta.finish_reason)
            if chunk:
                yield chunk


def _logprobs(service: GenerationService, values: tuple[TokenLogprob, ...]) -> list[dict[str, Any]]:
    return chat_logprobs(service.tokenizer, values)["content"] if values else []
