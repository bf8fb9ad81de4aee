"""The OpenAI dialect: chat completions, text completions, models."""

import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from kvloom.engine.errors import ServingError
from kvloom.engine.request import Delta, TokenLogprob
from kvloom.server.api.openai_bodies import ChatBody, CompletionBody
from kvloom.server.api.openai_shapes import (
    ChatChunkChoice,
    ChatDelta,
    Chunk,
    TextChunkChoice,
    TextLogprobs,
    Usage,
    chat_delta,
    chat_logprobs,
    chat_message,
    finish_name,
    prompt_logprobs,
    usage_of,
    usage_of_answers,
)
from kvloom.server.body import decode_body
from kvloom.server.chat_output import ChatOutput
from kvloom.server.chat_request import PreparedChat, prepare, read_answer
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
        params = body.params(self._models.options.default_max_tokens)
        chat = prepare(service, body.chat(), params)
        n = body.n or 1
        generation = Generation(
            f"chatcmpl-{self._new_id()}", (chat.prompt_ids,), chat.params, n, n, body.priority or 0, call.tenant
        )
        generation = replace(generation, cache_salt=body.cache_salt or "")
        service.check(generation, "messages")
        if body.stream:
            return Reply(
                media_type=MEDIA_TYPE,
                events=await Events.begin(self._chat_events(service, body, generation, chat), _error_event, DONE),
            )
        answers = await service.collect(generation)
        found = [read_answer(chat, answer) for answer in answers]
        choices = [
            {
                "index": i,
                "message": chat_message(whole, self._new_id),
                "logprobs": chat_logprobs(service.tokenizer, answer.logprobs) if body.logprobs else None,
                "finish_reason": finish_name(answer.finish_reason, len(whole.calls)),
                **({"token_ids": answer.token_ids} if body.return_token_ids else {}),
            }
            for i, (answer, whole) in enumerate(zip(answers, found, strict=True))
        ]
        num_reasoning = sum(whole.num_reasoning_tokens for whole in found)
        told = self._whole(service, generation, "chat.completion", choices, answers, num_reasoning)
        if body.prompt_logprobs is not None:
            told["prompt_logprobs"] = prompt_logprobs(service.tokenizer, answers[0].prompt_logprobs or (None,))
        if body.return_token_ids:
            told["prompt_token_ids"] = chat.prompt_ids
        return Reply(msgspec.json.encode(told))

    async def _chat_events(
        self, service: GenerationService, body: ChatBody, generation: Generation, chat: PreparedChat
    ) -> AsyncGenerator[bytes]:
        stream = _Stream(generation, "chat.completion.chunk", int(self._now()), service.name, body.wants_usage)
        outputs: dict[int, ChatOutput] = {}
        async with aclosing(service.stream(generation)) as deltas:
            async for index, delta in deltas:
                if index not in outputs:
                    prompt_ids = chat.prompt_ids if body.return_token_ids and not outputs else UNSET
                    outputs[index] = chat.output()
                    role = ChatChunkChoice(index, ChatDelta(role="assistant", content=""))
                    yield stream.event(role, prompt_ids=prompt_ids)
                output = outputs[index]
                parts = [chat_delta(event, self._new_id) for event in output.add(delta)]
                stream.count(delta, sum(output.num_reasoning_tokens for output in outputs.values()))
                logprobs = None
                if body.logprobs and delta.logprobs:
                    logprobs = chat_logprobs(service.tokenizer, delta.logprobs)
                token_ids = delta.token_ids if body.return_token_ids else UNSET
                if logprobs or token_ids:
                    parts = parts or [ChatDelta(content="")]
                for part in parts:
                    choice = ChatChunkChoice(index, part, logprobs, token_ids=token_ids)
                    yield stream.event(choice, body.wants_running_usage)
                    logprobs, token_ids = None, () if body.return_token_ids else UNSET
                if delta.finish_reason:
                    finish = finish_name(delta.finish_reason, output.num_calls)
                    choice = ChatChunkChoice(index, ChatDelta(), None, finish)
                    yield stream.event(choice, body.wants_running_usage)
        if body.wants_usage:
            yield stream.last()

    # -- completions

    async def completion(self, call: Call) -> Reply:
        """POST /v1/completions. Raises ServingError before anything is answered."""
        body = decode_body(_completion_decoder, call.body)
        service = self._models.choose(body.model)
        params = body.params()
        is_special = body.add_special_tokens is not False
        prompts = tuple(_prompt_ids(service.tokenizer, item, is_special) for item in body.texts_or_ids())
        n = body.n or 1
        generation = Generation(
            f"cmpl-{self._new_id()}", prompts, params, n, body.best_of or n, body.priority or 0, call.tenant
        )
        generation = replace(generation, cache_salt=body.cache_salt or "")
        service.check(generation, "prompt")
        if body.stream:
            return Reply(
                media_type=MEDIA_TYPE,
                events=await Events.begin(self._text_events(service, body, generation), _error_event, DONE),
            )
        answers = await service.collect(generation)
        choices = [_text_choice(service.tokenizer, i, answer, body) for i, answer in enumerate(answers)]
        return Reply(msgspec.json.encode(self._whole(service, generation, "text_completion", choices, answers)))

    async def _text_events(
        self, service: GenerationService, body: CompletionBody, generation: Generation
    ) -> AsyncGenerator[bytes]:
        stream = _Stream(generation, "text_completion", int(self._now()), service.name, body.wants_usage)
        formats: dict[int, TextLogprobs] = {}
        async with aclosing(service.stream(generation)) as deltas:
            async for index, delta in deltas:
                stream.count(delta)
                text, values = delta.text, list(zip(delta.token_ids, delta.logprobs, strict=False))
                is_first = index not in formats
                if is_first:
                    formats[index] = TextLogprobs(service.tokenizer)
                    if body.echo:
                        prompt = generation.prompts[index // generation.n]
                        text = _text_of(service.tokenizer, prompt) + text
                        values = [*zip(prompt, delta.prompt_logprobs or (), strict=False), *values]  # type: ignore[list-item]
                ids = delta.token_ids if body.return_token_ids else ()
                if not (text or values or ids or delta.finish_reason):
                    continue
                logprobs = formats[index].of(values) if body.logprobs is not None else None  # type: ignore[arg-type]
                finish = finish_name(delta.finish_reason)
                choice = TextChunkChoice(index, text, logprobs, finish, delta.stop_reason)
                if body.return_token_ids:
                    choice.token_ids = ids
                    choice.prompt_token_ids = generation.prompts[index // generation.n] if is_first else UNSET
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
        num_reasoning: int = 0,
    ) -> dict[str, Any]:
        return {
            "id": generation.id,
            "object": kind,
            "created": int(self._now()),
            "model": service.name,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
            "usage": usage_of_answers(generation.prompts, answers, num_reasoning),
        }


def _prompt_ids(tokenizer: TokenizerLike, item: str | list[int], is_special: bool) -> tuple[int, ...]:
    return tuple(tokenizer.encode(item, is_special) if isinstance(item, str) else item)


def _text_choice(tokenizer: TokenizerLike, index: int, answer: Answer, body: CompletionBody) -> dict[str, Any]:
    text = (_text_of(tokenizer, answer.prompt_ids) if body.echo else "") + answer.text
    logprobs = None
    if body.logprobs is not None:
        values: list[tuple[int, TokenLogprob | None]] = []
        if body.echo:
            values += zip(answer.prompt_ids, answer.prompt_logprobs or (None,), strict=False)
        values += zip(answer.token_ids, answer.logprobs, strict=True)
        logprobs = TextLogprobs(tokenizer).of(values)
    choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_name(answer.finish_reason)}
    choice["stop_reason"] = answer.stop_reason
    if body.prompt_logprobs is not None:
        choice["prompt_logprobs"] = prompt_logprobs(tokenizer, answer.prompt_logprobs or (None,))
    if body.return_token_ids:
        choice |= {"token_ids": answer.token_ids, "prompt_token_ids": answer.prompt_ids}
    return choice


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
        self._num_output = self._num_cached = self._num_reasoning = 0

    def count(self, delta: Delta, num_reasoning: int = 0) -> None:
        """`num_reasoning`: tokens of reasoning so far."""
        self._num_reasoning = num_reasoning
        self._num_output += len(delta.token_ids)
        self._num_cached = max(self._num_cached, delta.num_cached_tokens)

    def event(
        self,
        choice: ChatChunkChoice | TextChunkChoice,
        has_usage: bool = False,
        prompt_ids: tuple[int, ...] | UnsetType = UNSET,
    ) -> bytes:
        self._chunk.choices = [choice]  # type: ignore[assignment]
        self._chunk.prompt_token_ids = prompt_ids
        if has_usage:
            self._chunk.usage = self._usage()
        return event(self._encode(self._chunk))

    def last(self) -> bytes:
        self._chunk.choices, self._chunk.usage = [], self._usage()
        return event(self._encode(self._chunk))

    def _usage(self) -> Usage:
        return usage_of(self._num_prompt, self._num_output, self._num_cached, self._num_reasoning)
