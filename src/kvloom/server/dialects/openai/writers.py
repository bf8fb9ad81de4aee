"""Answers of chat and text completions: a stream's events, and the whole answer of the same deltas."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Generic

import msgspec
from msgspec import UNSET, UnsetType

from kvloom.contract.errors import ServingError
from kvloom.contract.request import Delta, KvGiven, TokenLogprob
from kvloom.contract.tokenizer import Tokenizer
from kvloom.server.chat.events import TextDelta
from kvloom.server.chat.output import ChatOutput
from kvloom.server.chat.request import ChatAnswer, PreparedChat
from kvloom.server.dialects.openai.bodies import ChatBody, CompletionBody, SamplingBody
from kvloom.server.dialects.openai.kv_transfer import given_together, kv_params
from kvloom.server.dialects.openai.shapes import (
    C,
    ChatChunkChoice,
    ChatDelta,
    ChatDeltas,
    Chunk,
    TextChunkChoice,
    TextLogprobs,
    TokenCounts,
    chat_logprobs,
    chat_message,
    finish_name,
    prompt_logprobs,
    raw_list,
)
from kvloom.server.errors import openai_error
from kvloom.server.http.job import Folding
from kvloom.server.http.reply import Reply
from kvloom.server.http.sse import DONE, TextFrame, event
from kvloom.server.serving.generation import Answer, Generation, best_choices
from kvloom.server.serving.service import GenerationService

FINGERPRINT = "fp_kvloom"
_encode = msgspec.json.Encoder().encode


class _CompletionWriter(Folding, Generic[C]):
    """Common parts of both kinds: the head of every event and of the whole answer, the usage, the end."""

    kind: str
    chunk_kind: str

    def __init__(self, service: GenerationService, generation: Generation, body: SamplingBody, created: int) -> None:
        """`created`: Unix time."""
        super().__init__(generation)
        self._service, self._created = service, created
        self._wants_usage, self._wants_running_usage = body.wants_usage, body.wants_running_usage
        self._counts = TokenCounts(generation)
        head = generation.id, self.chunk_kind, created, service.name, FINGERPRINT
        self._chunk: Chunk[C] = Chunk(*head, [], None if body.wants_usage else UNSET)
        self._is_plain = not (body.wants_running_usage or body.return_token_ids)  # most events say nothing but text
        self._texts: dict[int, TextFrame] = {}  # those events, by choice

    @property
    def tokenizer(self) -> Tokenizer:
        return self._service.tokenizer

    def num_reasoning(self, choices: Sequence[int] | None = None) -> int:
        """Tokens of reasoning, of these choices or of all."""
        return 0

    @abstractmethod
    def text_choice(self, choice: int) -> C:
        """The choice of an event that has nothing but text, with an empty text."""

    def text_event(self, choice: int, text: str) -> bytes:
        """An event with nothing but text."""
        frame = self._texts.get(choice)
        if frame is None:
            frame = self._texts[choice] = TextFrame(self.event(self.text_choice(choice)))
        return frame.of(text)

    def event(self, choice: C, prompt_ids: tuple[int, ...] | UnsetType = UNSET, given: KvGiven | None = None) -> bytes:
        chunk = self._chunk
        chunk.choices, chunk.prompt_token_ids = [choice], prompt_ids
        chunk.kv_transfer_params = kv_params(given) if given else UNSET
        if self._wants_running_usage:
            chunk.usage = self._counts.usage(self.num_reasoning())
        return event(_encode(chunk))

    def end(self) -> bytes:
        if not self._wants_usage:
            return DONE
        self._chunk.choices, self._chunk.usage = [], self._counts.usage(self.num_reasoning())
        self._chunk.kv_transfer_params = UNSET
        return event(_encode(self._chunk)) + DONE

    def error(self, error: ServingError) -> bytes:
        return event(_encode(openai_error(error))) + DONE

    def fold(self, choice: int, delta: Delta) -> None:
        super().fold(choice, delta)
        self._counts.add(choice, delta)

    def whole(self) -> Reply:
        best = best_choices(self.generation, self.answers)
        given = given_together(self.generation, self.answers)
        return Reply(
            _encode(
                {
                    "id": self.generation.id,
                    "object": self.kind,
                    "created": self._created,
                    "model": self._service.name,
                    "system_fingerprint": FINGERPRINT,
                    "choices": raw_list(self.choice(index, choice) for index, choice in enumerate(best)),
                    "usage": self._counts.usage(self.num_reasoning(best), best),
                    **self.rest(best[0]),
                    **({"kv_transfer_params": kv_params(given)} if given else {}),
                }
            )
        )

    @abstractmethod
    def choice(self, index: int, choice: int) -> dict[str, Any]:
        """A whole choice as number `index` of the answer."""

    def rest(self, choice: int) -> dict[str, Any]:
        """Data about the prompt of which this is the best choice."""
        return {}


class ChatWriter(_CompletionWriter[ChatChunkChoice]):
    """Of /v1/chat/completions: text, thoughts and tool calls of each choice."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(
        self, service: GenerationService, generation: Generation, body: ChatBody, created: int, chat: PreparedChat
    ) -> None:
        super().__init__(service, generation, body, created)
        self._body, self._chat = body, chat
        self._is_plain = self._is_plain and not body.logprobs
        self._outputs: dict[int, ChatOutput] = {}  # of the choices that have begun
        self._deltas: dict[int, ChatDeltas] = {}
        self._read = [ChatAnswer() for _ in self.answers]

    def num_reasoning(self, choices: Sequence[int] | None = None) -> int:
        given = self._outputs if choices is None else choices
        return sum(self._outputs[choice].num_reasoning_tokens for choice in given)

    def add(self, choice: int, delta: Delta) -> bytes:
        frames = [] if choice in self._outputs else self._begin(choice)
        output = self._outputs[choice]
        found = output.add(delta)
        self._counts.add(choice, delta)
        if self._is_plain and not delta.finish_reason and len(found) == 1 and isinstance(found[0], TextDelta):
            return b"".join((*frames, self.text_event(choice, found[0].text)))
        parts = self._deltas[choice].of(found, delta.finish_reason is not None)
        has_ids = bool(self._body.return_token_ids)
        logprobs = None
        if self._body.logprobs and delta.logprobs:
            logprobs = chat_logprobs(self.tokenizer, delta.logprobs)
        token_ids = delta.token_ids if has_ids else UNSET
        if logprobs or token_ids:
            parts = parts or [ChatDelta(content="")]
        for part in parts:
            frames.append(self.event(ChatChunkChoice(choice, part, logprobs, token_ids=token_ids)))
            logprobs, token_ids = None, () if has_ids else UNSET
        if delta.finish_reason:
            finish = finish_name(delta.finish_reason, output.num_calls)
            last = ChatChunkChoice(choice, ChatDelta(), None, finish, stop_reason=delta.stop_reason)
            frames.append(self.event(last, given=delta.kv_given))
        return b"".join(frames)

    def text_choice(self, choice: int) -> ChatChunkChoice:
        return ChatChunkChoice(choice, ChatDelta(content=""))

    def _begin(self, choice: int) -> list[bytes]:
        prompt_ids = self._chat.prompt_ids if self._body.return_token_ids and not self._outputs else UNSET
        self._outputs[choice], self._deltas[choice] = self._chat.output(), ChatDeltas(self._chat.customs)
        role = ChatChunkChoice(choice, ChatDelta(role=self._chat.role, content=""))
        echo = ChatChunkChoice(choice, ChatDelta(content=self._chat.echo))
        return [self.event(role, prompt_ids), *([self.event(echo)] if self._chat.echo else [])]

    def fold(self, choice: int, delta: Delta) -> None:
        super().fold(choice, delta)
        if choice not in self._outputs:
            self._outputs[choice] = self._chat.output()
        for found in self._outputs[choice].add(delta):
            self._read[choice].add(found)

    def choice(self, index: int, choice: int) -> dict[str, Any]:
        answer, read, body = self.answers[choice], self._read[choice], self._body
        return {
            "index": index,
            "message": chat_message(read, self._chat),
            "logprobs": chat_logprobs(self.tokenizer, answer.logprobs) if body.logprobs else None,
            "finish_reason": finish_name(answer.finish_reason, len(read.calls)),
            "stop_reason": answer.stop_reason,
            **({"token_ids": answer.token_ids} if body.return_token_ids else {}),
        }

    def rest(self, choice: int) -> dict[str, Any]:
        told: dict[str, Any] = {}
        num_top = self._body.prompt_logprobs
        if num_top is not None:
            values = self.answers[choice].prompt_logprobs or (None,)
            told["prompt_logprobs"] = prompt_logprobs(self.tokenizer, values, num_top)
        if self._body.return_token_ids:
            told["prompt_token_ids"] = self._chat.prompt_ids
        return told


class TextWriter(_CompletionWriter[TextChunkChoice]):
    """Of /v1/completions: text, with log-probabilities in the old form."""

    kind = chunk_kind = "text_completion"

    def __init__(self, service: GenerationService, generation: Generation, body: CompletionBody, created: int) -> None:
        super().__init__(service, generation, body, created)
        self._body = body
        self._is_plain = self._is_plain and body.logprobs is None
        self._formats: dict[int, TextLogprobs] = {}  # of the choices that have begun

    def add(self, choice: int, delta: Delta) -> bytes:
        self._counts.add(choice, delta)
        if self._is_plain and choice in self._formats and not delta.finish_reason:
            return self.text_event(choice, delta.text) if delta.text else b""
        body, text = self._body, delta.text
        values: list[tuple[int, TokenLogprob | None]] = [*zip(delta.token_ids, delta.logprobs, strict=False)]
        is_first = choice not in self._formats
        prompt = self.generation.prompt_of(choice)
        if is_first:
            self._formats[choice] = self._format(prompt)
            if body.echo:
                text = _text_of(self.tokenizer, prompt) + text
                values = [*zip(prompt, delta.prompt_logprobs or (), strict=False), *values]
        ids = delta.token_ids if body.return_token_ids else ()
        if not (text or values or ids or delta.finish_reason):
            return b""
        logprobs = self._formats[choice].of(values) if body.logprobs is not None else None
        chunk = TextChunkChoice(choice, text, logprobs, finish_name(delta.finish_reason), delta.stop_reason)
        if body.return_token_ids:
            chunk.token_ids = ids
            chunk.prompt_token_ids = prompt if is_first else UNSET
        return self.event(chunk, given=delta.kv_given)

    def text_choice(self, choice: int) -> TextChunkChoice:
        return TextChunkChoice(choice, "")

    def choice(self, index: int, choice: int) -> dict[str, Any]:
        answer, body = self.answers[choice], self._body
        told = {
            "index": index,
            "text": (_text_of(self.tokenizer, answer.prompt_ids) if body.echo else "") + answer.text,
            "logprobs": None if body.logprobs is None else self._logprobs(answer),
            "finish_reason": finish_name(answer.finish_reason),
            "stop_reason": answer.stop_reason,
        }
        if body.prompt_logprobs is not None:
            values = answer.prompt_logprobs or (None,)
            told["prompt_logprobs"] = prompt_logprobs(self.tokenizer, values, body.prompt_logprobs)
        if body.return_token_ids:
            told |= {"token_ids": answer.token_ids, "prompt_token_ids": answer.prompt_ids}
        return told

    def _logprobs(self, answer: Answer) -> dict[str, Any]:
        values: list[tuple[int, TokenLogprob | None]] = []
        if self._body.echo:
            values += zip(answer.prompt_ids, answer.prompt_logprobs or (None,), strict=False)
        values += zip(answer.token_ids, answer.logprobs, strict=True)
        return self._format(answer.prompt_ids).of(values)

    def _format(self, prompt_ids: tuple[int, ...]) -> TextLogprobs:
        """Of a choice of this prompt."""
        echoed = prompt_ids if self._body.echo else ()
        return TextLogprobs(
            self.tokenizer, self._body.logprobs or 0, self.generation.params.skip_special_tokens, echoed
        )


def _text_of(tokenizer: Tokenizer, ids: tuple[int, ...]) -> str:
    return b"".join(tokenizer.prompt_bytes(ids)).decode("utf-8", errors="replace")
