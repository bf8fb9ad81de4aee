"""OpenAI answers: the structs that become JSON, and the pieces both kinds of completion share."""

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from kvloom.engine.request import FinishReason, TokenLogprob
from kvloom.server.api.openai_tools import CallDelta, FunctionDelta, call_id
from kvloom.server.chat_events import ChatEvent, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart
from kvloom.server.chat_request import ChatAnswer
from kvloom.server.generation import Answer, TokenizerLike

FINISH = {
    FinishReason.EOS: "stop",
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "stop",
}


class CachedTokens(msgspec.Struct):
    cached_tokens: int = 0


class ReasoningTokens(msgspec.Struct):
    reasoning_tokens: int = 0


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens


def usage_of(num_prompt: int, num_output: int, num_cached: int, num_reasoning: int = 0) -> Usage:
    total = num_prompt + num_output
    return Usage(num_prompt, num_output, total, CachedTokens(num_cached), ReasoningTokens(num_reasoning))


def usage_of_answers(prompts: tuple[tuple[int, ...], ...], answers: list[Answer], num_reasoning: int = 0) -> Usage:
    """A prompt counts once, however many choices it has."""
    num_cached = max((answer.num_cached_tokens for answer in answers), default=0) if len(prompts) == 1 else 0
    if len(prompts) > 1:
        num_cached = sum(answer.num_cached_tokens for answer in answers)
    num_output = sum(len(answer.token_ids) for answer in answers)
    return usage_of(sum(map(len, prompts)), num_output, num_cached, num_reasoning)


def finish_name(reason: FinishReason | None, num_calls: int = 0) -> str | None:
    """`num_calls`: tool calls of the answer."""
    name = None if reason is None else FINISH[reason]
    return "tool_calls" if num_calls and name == "stop" else name


def token_text(tokenizer: TokenizerLike, token_id: int) -> str:
    """A token by itself as text; bytes that are no UTF-8 show as U+FFFD."""
    return tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")


def chat_logprobs(tokenizer: TokenizerLike, logprobs: tuple[TokenLogprob, ...] | list[TokenLogprob]) -> dict[str, Any]:
    """`logprobs` of a chat choice."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        return {"token": data.decode("utf-8", errors="replace"), "logprob": logprob, "bytes": list(data)}

    content = [
        entry(value.token_id, value.logprob) | {"top_logprobs": [entry(token, logprob) for token, logprob in value.top]}
        for value in logprobs
    ]
    return {"content": content, "refusal": None}


class TextLogprobs:
    """`logprobs` of a text choice, built token by token: `text_offset` counts characters from the text's beginning."""

    def __init__(self, tokenizer: TokenizerLike, offset: int = 0) -> None:
        self._tokenizer = tokenizer
        self._offset = offset

    def of(self, values: list[tuple[int, TokenLogprob | None]]) -> dict[str, Any]:
        """values: (token id, its log-probability or None for a first prompt token)."""
        tokens = [token_text(self._tokenizer, token_id) for token_id, _ in values]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "text_offset": offsets,
            "tokens": tokens,
            "token_logprobs": [None if value is None else value.logprob for _, value in values],
            "top_logprobs": [
                None if value is None else {token_text(self._tokenizer, i): logprob for i, logprob in value.top}
                for _, value in values
            ],
        }


def prompt_logprobs(tokenizer: TokenizerLike, values: Iterable[TokenLogprob | None]) -> list[dict[str, Any] | None]:
    """`prompt_logprobs` as vLLM has them: of each place its token and the likeliest ones, by id.

    The rank of a token that is not among the likeliest is not known: null.
    """

    def entry(token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": token_text(tokenizer, token_id)}

    found: list[dict[str, Any] | None] = []
    for value in values:
        if value is None:
            found.append(None)
            continue
        place = {str(value.token_id): entry(value.token_id, value.logprob, None)}
        place |= {str(id): entry(id, logprob, rank) for rank, (id, logprob) in enumerate(value.top, 1)}
        found.append(place)
    return found


class ChatDelta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # the older name of the same
    tool_calls: list[CallDelta] | None = None


def chat_delta(event: ChatEvent, new_id: Callable[[], str]) -> ChatDelta:
    """One event of an answer as the delta of a chunk."""
    match event:
        case TextDelta(text):
            return ChatDelta(content=text)
        case ReasoningDelta(text):
            return ChatDelta(reasoning=text, reasoning_content=text)
        case ToolCallStart(index, name):
            call = CallDelta(index, call_id(new_id()), "function", FunctionDelta(name, ""))
            return ChatDelta(tool_calls=[call])
        case ToolCallArguments(index, text):
            return ChatDelta(tool_calls=[CallDelta(index, function=FunctionDelta(arguments=text))])


def chat_message(answer: ChatAnswer, new_id: Callable[[], str]) -> dict[str, Any]:
    """The message of a whole choice; content is null when there are only calls."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.reasoning:
        message |= {"reasoning": answer.reasoning, "reasoning_content": answer.reasoning}
    if answer.calls:
        message["content"] = answer.text or None
        message["tool_calls"] = [
            {"id": call_id(new_id()), "type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in answer.calls
        ]
    return message


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    token_ids: tuple[int, ...] | UnsetType = UNSET


class TextChunkChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET  # with a choice's first tokens


class Chunk(msgspec.Struct):
    """One event of a stream. `usage` is left out unless asked for; then it is null but for the last event."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice] | list[TextChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET  # of a chat, in its first event
