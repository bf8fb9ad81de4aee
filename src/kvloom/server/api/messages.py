"""Anthropic's /v1/messages over the same chat, whole or as its sequence of events, and /v1/messages/count_tokens."""

import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec

from kvloom.engine.errors import ServingError
from kvloom.engine.request import FinishReason
from kvloom.server.api.messages_bodies import CountBody, MessagesBody
from kvloom.server.body import decode_body
from kvloom.server.errors import ErrorReply, anthropic_error, anthropic_reply
from kvloom.server.generation import Generation, GenerationService
from kvloom.server.models import Models
from kvloom.server.reply import Call, Endpoint, Events, Reply
from kvloom.server.sse import MEDIA_TYPE, named_event

Json = dict[str, Any]
PATH = "/v1/messages"
_STOP_REASONS = {
    FinishReason.EOS: "end_turn",
    FinishReason.STOP: "stop_sequence",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.ABORT: "end_turn",
}
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
        writer = MessageWriter(generation.id, service.name, len(ids))
        if body.stream:
            events = _events(service, generation, writer)
            return Reply(media_type=MEDIA_TYPE, events=await Events.begin(events, _error_event))
        [answer] = await service.collect(generation)
        writer.count(len(answer.token_ids), answer.num_cached_tokens)
        writer.text(answer.text)
        writer.end(answer.finish_reason or FinishReason.ABORT, answer.stop_reason)
        return Reply(msgspec.json.encode(writer.message))

    async def count(self, call: Call) -> Reply:
        """Raises BadRequest, NotFound."""
        body = decode_body(_count_decoder, call.body)
        service = self._models.choose(body.model)
        body.check()
        return Reply(msgspec.json.encode({"input_tokens": len(body.prompt(service.tokenizer))}))


async def _events(service: GenerationService, generation: Generation, writer: "MessageWriter") -> AsyncGenerator[bytes]:
    """The first comes with the first token, so that an error before it has a status."""
    is_begun = False
    async with aclosing(service.stream(generation)) as deltas:
        async for _, delta in deltas:
            writer.count(len(delta.token_ids), delta.num_cached_tokens)
            chunk = b"" if is_begun else writer.begin()
            is_begun = True
            if delta.text:
                chunk += writer.text(delta.text)
            if delta.finish_reason:
                chunk += writer.end(delta.finish_reason, delta.stop_reason)
            if chunk:
                yield chunk


class MessageWriter:
    """Builds a message from what is generated, and says so in events. Every method returns the events it made.

    A block is opened by its first delta.
    """

    def __init__(self, id: str, model: str, num_prompt: int) -> None:
        self.message: Json = {
            "id": id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._num_prompt = num_prompt
        self._num_output = self._num_cached = 0
        self._encode = msgspec.json.Encoder().encode

    def begin(self) -> bytes:
        return self._event("message_start", message=self.message | {"usage": self._usage()}) + self._event("ping")

    def count(self, num_tokens: int, num_cached: int) -> None:
        """Output tokens more; prompt tokens that were cached."""
        self._num_output += num_tokens
        self._num_cached = max(self._num_cached, num_cached)

    def text(self, delta: str) -> bytes:
        """More of the text."""
        if not delta:
            return b""
        blocks, events = self.message["content"], b""
        if not blocks:
            blocks.append({"type": "text", "text": ""})
            events = self._of_block("content_block_start", content_block=blocks[-1])
        blocks[-1]["text"] += delta
        return events + self._of_block("content_block_delta", delta={"type": "text_delta", "text": delta})

    def end(self, reason: FinishReason, stop: str | int | None) -> bytes:
        """`stop`: the stop sequence that ended it."""
        events = self._of_block("content_block_stop") if self.message["content"] else b""
        said = {
            "stop_reason": _STOP_REASONS[reason],
            "stop_sequence": stop if isinstance(stop, str) else None,
        }
        self.message |= said | {"usage": self._usage()}
        events += self._event("message_delta", delta=said, usage=self._usage())
        return events + self._event("message_stop")

    def _usage(self) -> Json:
        """Anthropic counts cached tokens beside the others, not among them."""
        return {
            "input_tokens": self._num_prompt - self._num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self._num_cached,
            "output_tokens": self._num_output,
        }

    def _of_block(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, index=len(self.message["content"]) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        return named_event(kind, self._encode({"type": kind, **fields}))


def _error_event(error: ServingError) -> bytes:
    return named_event("error", msgspec.json.encode(anthropic_error(error)))
