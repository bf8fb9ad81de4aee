"""The OpenAI dialect: chat completions, text completions, models."""

import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec

from kvloom.engine.errors import ServingError
from kvloom.engine.request import Delta, TokenLogprob
from kvloom.server.api.openai_bodies import ChatBody, CompletionBody, template_values
from kvloom.server.api.openai_shapes import (
    ChatChunkChoice,
    ChatDelta,
    Chunk,
    TextChunkChoice,
    TextLogprobs,
    Usage,
    chat_logprobs,
    finish_name,
    usage_of,
    usage_of_answers,
)
from kvloom.server.body import decode_body
from kvloom.server.errors import ErrorReply, openai_error, openai_reply
from kvloom.server.generation import Answer, Generation, GenerationService, TokenizerLike
from kvloom.server.models import Models
from kvloom.server.reply import Call, Endpoint, Events, Reply
from kvloom.server.sse import DONE, MEDIA_TYPE, event

FINGERPRINT = "fp_kvloom"
OWNER = "MindIE Server"

_chat_decoder = msgspec.json.Decoder(ChatBody)
_completion_decoder = msgspec.json.Decoder(CompletionBody)


class OpenAI:
    """Parses OpenAI bodies, runs them, formats the answers. `now` and `new_id` are injected for golden files."""

    def __init__(
        self,
        models: Models,
        now: Callable[[], float] = time.time,
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
    ) -> None:
        self._models = models
        self._now, self._new_id = now, new_id
        self._started = int(now())

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        return (
            Endpoint("POST", "/v1/chat/completions", self.chat, "Chat", (ChatBody,), True, is_streaming=True),
            Endpoint("POST", "/v1/completions", self.completion, "Text", (CompletionBody,), True, is_streaming=True),
            Endpoint("GET", "/v1/models", self.models, "The served models"),
            Endpoint("GET", "/v1/models/{name:path}", self.model, "One model"),
        )

    def error_reply(self, error: ServingError) -> ErrorReply:
        return openai_reply(error)

    # -- models

    async def models(self, call: Call) -> Reply:
        return Reply(msgspec.json.encode({"object": "list", "data": [self._card(s) for s in self._models.served]}))

    async def model(self, call: Call) -> Reply:
        """Raises NotFound."""
        return Reply(msgspec.json.encode(self._card(self._models.get(call.path["name"]))))

    def _card(self, service: GenerationService) -> dict[str, Any]:
        return {
            "id": service.name,
            "object": "model",
            "created": self._started,
            "owned_by": OWNER,
            "root": service.root,
            "parent": service.parent,
            "max_model_len": service.engine.max_seq_len,
        }

    # -- chat

    async def chat(self, call: Call) -> Reply:
        """POST /v1/chat/completions. Raises ServingError before anything is answered."""
        body = decode_body(_chat_decoder, call.body)
        service = self._models.choose(body.model)
        body.refuse_unsupported()
        params = body.params(self._models.options.default_max_tokens)
        add_prompt = body.add_generation_prompt is not False
        text = service.tokenizer.apply_chat_template(
            body.conversation(), add_generation_prompt=add_prompt, **template_values(body.chat_template_kwargs)
        )
        ids = tuple(service.tokenizer.encode(text, add_special_tokens=False))
        n = body.n or 1
        generation = Generation(f"chatcmpl-{self._new_id()}", (ids,), params, n, n, body.priority or 0, call.tenant)
        service.check(generation, "messages")
        if body.stream:
            return Reply(
                media_type=MEDIA_TYPE,
                events=await Events.begin(self._chat_events(service, body, generation), _error_event, DONE),
            )
        answers = await service.collect(generation)
        choices = [_chat_choice(service.tokenizer, i, answer, body) for i, answer in enumerate(answers)]
        return Reply(body=self._whole(service, generation, "chat.completion", choices, answers))

    async def _chat_events(
        self, service: GenerationService, body: ChatBody, generation: Generation
    ) -> AsyncGenerator[bytes]:
        stream = _Stream(generation, "chat.completion.chunk", int(self._now()), service.name, body.wants_usage)
        begun: set[int] = set()
        async with aclosing(service.stream(generation)) as deltas:
            async for index, delta in deltas:
                if index not in begun:
                    begun.add(index)
                    yield stream.event(ChatChunkChoice(index, ChatDelta(role="assistant", content="")))
                stream.count(delta)
                if delta.text or delta.logprobs:
                    logprobs = chat_logprobs(service.tokenizer, delta.logprobs) if body.logprobs else None
                    choice = ChatChunkChoice(index, ChatDelta(content=delta.text), logprobs)
                    yield stream.event(choice, body.wants_running_usage)
                if delta.finish_reason:
                    choice = ChatChunkChoice(index, ChatDelta(), None, finish_name(delta.finish_reason))
                    yield stream.event(choice, body.wants_running_usage)
        if body.wants_usage:
            yield stream.last()

    # -- completions

    async def completion(self, call: Call) -> Reply:
        """POST /v1/completions. Raises ServingError before anything is answered."""
        body = decode_body(_completion_decoder, call.body)
        service = self._models.choose(body.model)
        params = body.params()
        prompts = tuple(_prompt_ids(service.tokenizer, item) for item in body.texts_or_ids())
        n = body.n or 1
        generation = Generation(
            f"cmpl-{self._new_id()}", prompts, params, n, body.best_of or n, body.priority or 0, call.tenant
        )
        service.check(generation, "prompt")
        if body.stream:
            return Reply(
                media_type=MEDIA_TYPE,
                events=await Events.begin(self._text_events(service, body, generation), _error_event, DONE),
            )
        answers = await service.collect(generation)
        choices = [_text_choice(service.tokenizer, i, answer, body) for i, answer in enumerate(answers)]
        return Reply(body=self._whole(service, generation, "text_completion", choices, answers))

    async def _text_events(
        self, service: GenerationService, body: CompletionBody, generation: Generation
    ) -> AsyncGenerator[bytes]:
        stream = _Stream(generation, "text_completion", int(self._now()), service.name, body.wants_usage)
        formats: dict[int, TextLogprobs] = {}
        async with aclosing(service.stream(generation)) as deltas:
            async for index, delta in deltas:
                stream.count(delta)
                text, values = delta.text, list(zip(delta.token_ids, delta.logprobs, strict=False))
                if index not in formats:
                    formats[index] = TextLogprobs(service.tokenizer)
                    if body.echo:
                        prompt = generation.prompts[index // generation.n]
                        text = _text_of(service.tokenizer, prompt) + text
                        values = [*zip(prompt, delta.prompt_logprobs or (), strict=False), *values]  # type: ignore[list-item]
                if not (text or values or delta.finish_reason):
                    continue
                logprobs = formats[index].of(values) if body.logprobs is not None else None  # type: ignore[arg-type]
                finish = finish_name(delta.finish_reason)
                choice = TextChunkChoice(index, text, logprobs, finish, delta.stop_reason)
                yield stream.event(choice, body.wants_running_usage)
        if body.wants_usage:
            yield stream.last()

    # -- both

    def _whole(
        self,
        service: GenerationService,
        generation: Generation,
        kind: str,
        choices: list[dict[str, Any]],
        answers: list[Answer],
    ) -> bytes:
        return msgspec.json.encode(
            {
                "id": generation.id,
                "object": kind,
                "created": int(self._now()),
                "model": service.name,
                "system_fingerprint": FINGERPRINT,
                "choices": choices,
                "usage": usage_of_answers(generation.prompts, answers),
            }
        )


def _chat_choice(tokenizer: TokenizerLike, index: int, answer: Answer, body: ChatBody) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": answer.text, "refusal": None},
        "logprobs": chat_logprobs(tokenizer, answer.logprobs) if body.logprobs else None,
        "finish_reason": finish_name(answer.finish_reason),
    }


def _prompt_ids(tokenizer: TokenizerLike, item: str | list[int]) -> tuple[int, ...]:
    return tuple(tokenizer.encode(item) if isinstance(item, str) else item)


def _text_choice(tokenizer: TokenizerLike, index: int, answer: Answer, body: CompletionBody) -> dict[str, Any]:
    text = (_text_of(tokenizer, answer.prompt_ids) if body.echo else "") + answer.text
    logprobs = None
    if body.logprobs is not None:
        values: list[tuple[int, TokenLogprob | None]] = []
        if body.echo:
            values += zip(answer.prompt_ids, answer.prompt_logprobs or (None,), strict=False)
        values += zip(answer.token_ids, answer.logprobs, strict=True)
        logprobs = TextLogprobs(tokenizer).of(values)
    finish = finish_name(answer.finish_reason)
    stop = answer.stop_reason
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish, "stop_reason": stop}


def _text_of(tokenizer: TokenizerLike, ids: tuple[int, ...]) -> str:
    return b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", errors="replace")


def _error_event(error: ServingError) -> bytes:
    return event(msgspec.json.encode(openai_error(error)))


class _Stream:
    """What the events of one answer have in common, and its token counts."""

    def __init__(self, generation: Generation, kind: str, created: int, model: str, has_usage: bool) -> None:
        self._chunk = Chunk(generation.id, kind, created, model, FINGERPRINT, [])
        if has_usage:
            self._chunk.usage = None
        self._encode = msgspec.json.Encoder().encode
        self._num_prompt = sum(map(len, generation.prompts))
        self._num_output = self._num_cached = 0

    def count(self, delta: Delta) -> None:
        self._num_output += len(delta.token_ids)
        self._num_cached = max(self._num_cached, delta.num_cached_tokens)

    def event(self, choice: ChatChunkChoice | TextChunkChoice, has_usage: bool = False) -> bytes:
        self._chunk.choices = [choice]  # type: ignore[assignment]
        if has_usage:
            self._chunk.usage = self._usage()
        return event(self._encode(self._chunk))

    def last(self) -> bytes:
        self._chunk.choices, self._chunk.usage = [], self._usage()
        return event(self._encode(self._chunk))

    def _usage(self) -> Usage:
        return usage_of(self._num_prompt, self._num_output, self._num_cached)
