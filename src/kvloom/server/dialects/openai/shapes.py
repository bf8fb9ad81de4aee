"""OpenAI answers: the structs that become JSON, and the pieces both kinds of completion share."""

from codecs import getincrementaldecoder
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from kvloom.contract.request import Delta, FinishReason, TokenLogprob
from kvloom.contract.tokenizer import Tokenizer
from kvloom.engine.text.detok import text_bytes
from kvloom.server.chat.events import ChatEvent, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart
from kvloom.server.chat.request import ChatAnswer, PreparedChat
from kvloom.server.dialects.openai.custom import InputText, input_of, only_text
from kvloom.server.dialects.openai.tools import CallDelta, CustomDelta, FunctionDelta, call_id
from kvloom.server.serving.generation import Generation

FINISH = {
    FinishReason.EOS: "stop",
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "stop",
}


class CachedTokens(msgspec.Struct):
    cached_tokens: int = 0


class CompletionDetails(msgspec.Struct):
    """The last two where the request has a `prediction`: tokens of it that were tried and right, and wrong."""

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionDetails


class TokenCounts:
    """How many tokens each choice has, and how many of its prompt's were cached."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._num_output = [0] * generation.num_choices
        self._num_cached = [-1] * generation.num_choices  # -1 = not known yet
        self._num_guessed = [(0, 0)] * generation.num_choices  # right, wrong

    def add(self, choice: int, delta: Delta) -> None:
        self._num_output[choice] += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._num_guessed[choice] = delta.num_guessed
        if delta.num_cached_tokens > self._num_cached[choice]:
            self._num_cached[choice] = delta.num_cached_tokens

    def usage(self, num_reasoning: int = 0, choices: Sequence[int] | None = None) -> Usage:
        """Of these choices, or of all. A prompt counts once, however many choices it has, and as cached counts what no
        choice had to compute.
        """
        given = range(len(self._num_output)) if choices is None else choices
        num_prompt, num_output = self._generation.num_prompt_tokens, sum(self._num_output[i] for i in given)
        cached: dict[int, int] = {}  # by the number of the prompt
        for choice in given:
            prompt, count = choice // self._generation.best_of, self._num_cached[choice]
            if count >= 0:
                cached[prompt] = min(cached.get(prompt, count), count)
        details = CachedTokens(sum(cached.values())), CompletionDetails(num_reasoning)
        if self._generation.prediction:
            guessed = [self._num_guessed[i] for i in given]
            details[1].accepted_prediction_tokens = sum(right for right, _ in guessed)
            details[1].rejected_prediction_tokens = sum(wrong for _, wrong in guessed)
        return Usage(num_prompt, num_output, num_prompt + num_output, *details)


def raw_list(items: Iterable[object]) -> msgspec.Raw:
    """As JSON, one by one: a call of the encoder keeps the interpreter to itself."""
    return msgspec.Raw(b"[" + b",".join(map(msgspec.json.encode, items)) + b"]")


def finish_name(reason: FinishReason | None, num_calls: int = 0) -> str | None:
    """`num_calls`: tool calls of the answer."""
    name = None if reason is None else FINISH[reason]
    return "tool_calls" if num_calls and name == "stop" else name


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token by itself as text; bytes that are no UTF-8 show as U+FFFD."""
    return tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")


def chat_logprobs(tokenizer: Tokenizer, logprobs: tuple[TokenLogprob, ...] | list[TokenLogprob]) -> dict[str, Any]:
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
    """`logprobs` of a text choice, built token by token.

    `text_offset` counts whole characters from the text's beginning: all tokens of one character have the same, and a
    special token that the text leaves out takes none. A token's `top_logprobs` hold itself too.
    """

    def __init__(
        self, tokenizer: Tokenizer, num_top: int, skips_special: bool = True, prompt_ids: Sequence[int] = ()
    ) -> None:
        """`num_top`: likeliest tokens that are shown. `prompt_ids`: of an echoed prompt, with whose text it begins."""
        self._num_top = num_top
        self._tokenizer = tokenizer
        self._bytes_of = text_bytes(tokenizer, skips_special)
        self._prompt = deque(tokenizer.prompt_bytes(prompt_ids))  # of the tokens that are still to come
        self._offset = 0
        self._characters = getincrementaldecoder("utf-8")(errors="replace")

    def of(self, values: list[tuple[int, TokenLogprob | None]]) -> dict[str, Any]:
        """values: (token id, its log-probability or None for a first prompt token)."""
        offsets = []
        for token_id, _ in values:
            offsets.append(self._offset)
            data = self._prompt.popleft() if self._prompt else self._bytes_of(token_id)
            self._offset += len(self._characters.decode(data))
        return {
            "text_offset": offsets,
            "tokens": [token_text(self._tokenizer, token_id) for token_id, _ in values],
            "token_logprobs": [None if value is None else value.logprob for _, value in values],
            "top_logprobs": [None if value is None else self._top(value) for _, value in values],
        }

    def _top(self, value: TokenLogprob) -> dict[str, float]:
        """The chosen token, then the likeliest; of several that look alike the first is shown."""
        found: dict[str, float] = {}
        for token_id, logprob in ((value.token_id, value.logprob), *value.top[: self._num_top]):
            found.setdefault(token_text(self._tokenizer, token_id), logprob)
        return found


def prompt_logprobs(
    tokenizer: Tokenizer, values: Iterable[TokenLogprob | None], num_top: int
) -> list[dict[str, Any] | None]:
    """`prompt_logprobs` as vLLM has them: of each position its token and the `num_top` likeliest ones, by id.

    The rank of a token that is not among the most likely ones is unknown: null.
    """

    def entry(token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": token_text(tokenizer, token_id)}

    found: list[dict[str, Any] | None] = []
    for value in values:
        if value is None:
            found.append(None)
            continue
        entries = {str(value.token_id): entry(value.token_id, value.logprob, None)}
        entries |= {str(id): entry(id, logprob, rank) for rank, (id, logprob) in enumerate(value.top[:num_top], 1)}
        found.append(entries)
    return found


class ChatDelta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # the older name of the same
    tool_calls: list[CallDelta] | None = None


def chat_delta(event: ChatEvent) -> ChatDelta:
    """One event of an answer as the delta of a chunk."""
    match event:
        case TextDelta(text):
            return ChatDelta(content=text)
        case ReasoningDelta(text):
            return ChatDelta(reasoning=text, reasoning_content=text)
        case ToolCallStart(index, name):
            call = CallDelta(index, call_id(), "function", FunctionDelta(name, ""))
            return ChatDelta(tool_calls=[call])
        case ToolCallArguments(index, text):
            return ChatDelta(tool_calls=[CallDelta(index, function=FunctionDelta(arguments=text))])


class ChatDeltas:
    """The events of one choice as deltas. `customs`: names of the tools whose calls have a text as input."""

    def __init__(self, customs: frozenset[str]) -> None:
        self._customs = customs
        self._input: InputText | None = None  # of the open call, if it is of such a tool
        self._index, self._arguments = 0, ""

    def of(self, events: Sequence[ChatEvent], is_last: bool) -> list[ChatDelta]:
        """`is_last`: no more events come."""
        if not self._customs:
            return [chat_delta(event) for event in events]
        return [delta for event in (*events, *([None] if is_last else [])) for delta in self._deltas(event)]

    def _deltas(self, event: ChatEvent | None) -> Iterator[ChatDelta]:
        if isinstance(event, ToolCallArguments) and self._input is not None:
            self._arguments += event.text
            yield from self._more(self._input.add(event.text))
            return
        if (event is None or isinstance(event, ToolCallStart)) and self._input is not None:
            yield from self._more("" if self._input.is_found else only_text(self._arguments))
            self._input = None
        if isinstance(event, ToolCallStart) and event.name in self._customs:
            self._input, self._index, self._arguments = InputText(), event.index, ""
            call = CallDelta(event.index, call_id(), "custom", custom=CustomDelta(event.name, ""))
            yield ChatDelta(tool_calls=[call])
        elif event is not None:
            yield chat_delta(event)

    def _more(self, text: str) -> Iterator[ChatDelta]:
        if text:
            yield ChatDelta(tool_calls=[CallDelta(self._index, custom=CustomDelta(input=text))])


def chat_message(answer: ChatAnswer, chat: PreparedChat) -> dict[str, Any]:
    """The message of a whole choice; content is null when there are only calls."""
    text = chat.echo + answer.text
    message: dict[str, Any] = {"role": chat.role, "content": text, "refusal": None}
    if answer.reasoning:
        message |= {"reasoning": answer.reasoning, "reasoning_content": answer.reasoning}
    if answer.calls:
        message["content"] = text or None
        message["tool_calls"] = [_call(*call, chat.customs) for call in answer.calls]
    return message


def _call(name: str, arguments: str, customs: frozenset[str]) -> dict[str, Any]:
    if name in customs:
        return {"id": call_id(), "type": "custom", "custom": {"name": name, "input": input_of(arguments)}}
    return {"id": call_id(), "type": "function", "function": {"name": name, "arguments": arguments}}


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    token_ids: tuple[int, ...] | UnsetType = UNSET
    stop_reason: str | int | UnsetType | None = UNSET  # with the finish_reason


class TextChunkChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET  # with a choice's first tokens


C = TypeVar("C", ChatChunkChoice, TextChunkChoice)


class Chunk(msgspec.Struct, Generic[C]):
    """One event of a stream. `usage` is left out unless asked for; then it is null except in the last event."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[C]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET  # of a chat, in its first event
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET  # in the last event of a choice that was computed for it
