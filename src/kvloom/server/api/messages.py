"""Anthropic's /v1/messages over the same chat, whole or as its sequence of events, and /v1/messages/count_tokens."""

import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec

from kvloom.engine.errors import ServingError
from kvloom.engine.request import SamplingParams
from kvloom.server.api.messages_bodies import CountBody, MessagesBody
from kvloom.server.api.messages_shapes import MessageWriter
from kvloom.server.body import decode_body
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
        chat = body.prepared(service, body.params())
        ids, id = chat.prompt_ids, f"msg_{self._new_id()}"
        generation = Generation(id, (ids,), chat.params, priority=body.priority or 0, tenant=call.tenant)
        service.check(generation, "messages")
        writer = MessageWriter(id, service.name, len(ids), self._new_id)
        events = _events(service, generation, chat.output(), writer)
        if body.stream:
            return Reply(media_type=MEDIA_TYPE, events=await Events.begin(events, _error_event))
        async with aclosing(events):
            async for _ in events:  # the message is built by the way
                pass
        return Reply(msgspec.json.encode(writer.message))

    async def count(self, call: Call) -> Reply:
        """Raises BadRequest, NotFound."""
        body = decode_body(_count_decoder, call.body)
        service = self._models.choose(body.model)
        chat = body.prepared(service, SamplingParams())
        return Reply(msgspec.json.encode({"input_tokens": len(chat.prompt_ids)}))


async def _events(
    service: GenerationService, generation: Generation, output: ChatOutput, writer: MessageWriter
) -> AsyncGenerator[bytes]:
    """The first comes with the first token, so that an error before it has a status."""
    is_begun = False
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
