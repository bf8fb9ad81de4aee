"""Anthropic's /v1/messages over the same chat, whole or as its sequence of events, and /v1/messages/count_tokens."""

import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec

from kvloom.engine.errors import ServingError
from kvloom.engine.request import FinishReason
from kvloom.server.api.messages_bodies import CountBody, MessagesBody
from kvloom.server.api.messages_shapes import MessageWriter
from kvloom.server.body import decode_body
from kvloom.server.chat_events import TextDelta
from kvloom.server.chat_output import ChatOutput
from kvloom.server.errors import ErrorReply, anthropic_error, anthropic_reply
from kvloom.server.generation import Generation, GenerationService
from kvloom.server.models import Models
from kvloom.server.reply import Call, Endpoint, Events, Reply
from kvloom.server.sse import MEDIA_TYPE, named_event

PATH = "/v1/messages"
_decoder = msgspec.json.Decoder(MessagesBody)
_count_decoder = msgspec.json.Decoder(CountBody)


class Messages:
    """`new_id` is injected for golden files. The header anthropic-version has no effect."""

    def __init__(self, models: Models, new_id: Callable[[], str] = lambda: uuid.uuid4().hex) -> None:
        self._models, self._new_id = models, new_id

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        return (
            Endpoint("POST", PATH, self.create, "Messages", (MessagesBody,), True, is_streaming=True),
            Endpoint("POST", f"{PATH}/count_tokens", self.count, "Tokens of a message's prompt", (CountBody,)),
        )

    def error_reply(self, error: ServingError) -> ErrorReply:
        return anthropic_reply(error)

    async def create(self, call: Call) -> Reply:
        """Raises ServingError before anything is answered."""
        body = decode_body(_decoder, call.body)
        service = self._models.choose(body.model)
        body.check()
        ids, params = body.prompt(service.tokenizer), body.params()
        generation = Generation(
            f"msg_{self._new_id()}", (ids,), params, priority=body.priority or 0, tenant=call.tenant
        )
        service.check(generation, "messages")
        writer = MessageWriter(generation.id, service.name, len(ids), self._new_id)
        if body.stream:
            events = _events(service, generation, writer)
            return Reply(media_type=MEDIA_TYPE, events=await Events.begin(events, _error_event))
        [answer] = await service.collect(generation)
        writer.count(len(answer.token_ids), answer.num_cached_tokens)
        writer.add([TextDelta(answer.text)] if answer.text else [])
        writer.end(answer.finish_reason or FinishReason.ABORT, answer.stop_reason)
        return Reply(msgspec.json.encode(writer.message))

    async def count(self, call: Call) -> Reply:
        """Raises BadRequest, NotFound."""
        body = decode_body(_count_decoder, call.body)
        service = self._models.choose(body.model)
        body.check()
        return Reply(msgspec.json.encode({"input_tokens": len(body.prompt(service.tokenizer))}))


async def _events(service: GenerationService, generation: Generation, writer: MessageWriter) -> AsyncGenerator[bytes]:
    """The first comes with the first token, so that an error before it has a status."""
    output, is_begun = ChatOutput(), False
    async with aclosing(service.stream(generation)) as deltas:
        async for _, delta in deltas:
            found = output.add(delta)
            writer.count(len(delta.token_ids), delta.num_cached_tokens)
            chunk = b"" if is_begun else writer.begin()
            is_begun = True
            chunk += writer.add(found)
            if delta.finish_reason:
                chunk += writer.end(delta.finish_reason, delta.stop_reason)
            if chunk:
                yield chunk


def _error_event(error: ServingError) -> bytes:
    return named_event("error", msgspec.json.encode(anthropic_error(error)))
