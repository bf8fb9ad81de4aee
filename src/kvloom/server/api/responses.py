"""OpenAI's /v1/responses over the same chat: stateless, whole or as its sequence of events."""

import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec

from kvloom.engine.errors import ServingError
from kvloom.engine.request import TokenLogprob
from kvloom.server.api.openai_shapes import chat_logprobs
from kvloom.server.api.responses_bodies import ResponsesBody
from kvloom.server.api.responses_shapes import ResponseWriter, response_object
from kvloom.server.body import decode_body
from kvloom.server.chat_output import ChatOutput
from kvloom.server.chat_request import prepare
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
        chat = prepare(service, body.chat(), body.params(self._models.options.default_max_tokens))
        ids, id = chat.prompt_ids, f"resp_{self._new_id()}"
        generation = Generation(id, (ids,), chat.params, priority=body.priority or 0, tenant=call.tenant)
        service.check(generation, "input")
        response = response_object(id, int(self._now()), service.name, body)
        writer = ResponseWriter(response, len(ids), self._new_id)
        events = _events(service, generation, chat.output(), writer)
        if body.stream:
            return Reply(media_type=MEDIA_TYPE, events=await Events.begin(events, writer.failed))
        async with aclosing(events):
            async for _ in events:  # the response is built by the way
                pass
        return Reply(msgspec.json.encode(response))


async def _events(
    service: GenerationService, generation: Generation, output: ChatOutput, writer: ResponseWriter
) -> AsyncGenerator[bytes]:
    """The first comes with the first token, so that an error before it has a status."""
    is_begun = False
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
