"""OpenAI's request bodies and their meaning. Unknown keys are ignored, as OpenAI does; known ones are checked.

Beyond OpenAI's own: top_k, min_p, typical_p, repetition_penalty, ignore_eos, stop_token_ids, min_tokens,
skip_special_tokens, include_stop_str_in_output, priority (the names vLLM gave them), and what constraints.py has.
"""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvloom.contract.config import MAX_COUNT
from kvloom.contract.errors import BadRequest
from kvloom.contract.numbers import whole
from kvloom.contract.sampling import SamplingParams
from kvloom.server.chat.request import ChatRequest
from kvloom.server.dialects.constraints import Constraints
from kvloom.server.dialects.openai.generation_config import read_generation_config
from kvloom.server.dialects.openai.kv_transfer import KvTransferParams
from kvloom.server.dialects.openai.messages import Message, conversation_of
from kvloom.server.dialects.openai.tools import NamedChoice, ToolBody, read_tools
from kvloom.server.dialects.sampling import Named, bounds
from kvloom.server.errors import AnswerTooLong

MAX_STOPS = 4
MAX_CHOICES = 128
TokenId = Annotated[int, Meta(ge=0)]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class SamplingBody(Constraints, kw_only=True):
    """Common fields of chat and text completions."""

    honoured = frozenset({"kv_transfer_params"})

    model: str | None = None
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    temperature: Annotated[float, bounds("temperature", high=2)] | None = None
    top_p: Annotated[float, bounds("top_p", opens_low=False)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, bounds("seed")] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    frequency_penalty: Annotated[float, bounds("frequency_penalty")] | None = None
    presence_penalty: Annotated[float, bounds("presence_penalty")] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, bounds("min_p")] | None = None
    typical_p: Annotated[float, bounds("typical_p")] | None = None
    repetition_penalty: Annotated[float, bounds("repetition_penalty")] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: Annotated[int, Meta(ge=0, le=5)] | None = None  # 1 the most urgent; 0 = none
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None  # requests of different salts share no cached prompts
    prompt_logprobs: Annotated[int, bounds("prompt_logprobs")] | None = None
    return_token_ids: bool | None = False
    kv_transfer_params: KvTransferParams | None = None

    def sampling(self, logprobs: int | None, max_tokens: int | None, prompt_logprobs: int | None) -> SamplingParams:
        """Raises BadRequest naming the field."""
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options", "is only allowed when stream is true")
        if max_tokens is not None and (self.min_tokens or 0) > max_tokens:
            raise BadRequest("min_tokens", f"must be at most max_tokens ({max_tokens}), got {self.min_tokens}")
        if self.prompt_logprobs is not None and self.stream:
            raise BadRequest("prompt_logprobs", "cannot be streamed; leave out stream or prompt_logprobs")
        if self.top_p is not None and self.top_p == 0:
            raise BadRequest("top_p", "must be above 0; for greedy answers set temperature to 0")
        return _NAMED.params(
            self,
            top_k=max(0, self.top_k or 0),
            logit_bias=_logit_bias(self.logit_bias),
            max_tokens=max_tokens,
            stop=_stops(self.stop),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=self.answer_grammar(),
        )

    @property
    def asked_tokens(self) -> tuple[str, int | None]:
        """The field that limits the answer's length, and its value."""
        return "max_tokens", self.max_tokens

    def check_context(self, prompts: Iterable[tuple[int, ...]], context: int) -> None:
        """Raises AnswerTooLong when a prompt's tokens and those asked for are more than `context`."""
        field, asked = self.asked_tokens
        longest = max(map(len, prompts))
        if asked is not None and longest + asked > context:
            raise AnswerTooLong(field, longest, asked, context)

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        return self.wants_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


_NAMED = Named(SamplingBody)


def template_values(given: dict[str, Any] | None) -> dict[str, Any]:
    """chat_template_kwargs. Raises BadRequest when they repeat a field of the request."""
    for name in ("messages", "tools", "add_generation_prompt", "self"):
        if name in (given or {}):
            raise BadRequest("chat_template_kwargs", f"must not hold {name}")
    return given or {}


def effort_values(effort: str | None, verbosity: str | None = None) -> dict[str, Any]:
    """How much to think and to say, as templates know it."""
    told = {} if verbosity is None else {"verbosity": verbosity}
    if effort == "none":
        return {**told, "enable_thinking": False}
    return told if effort is None else {**told, "reasoning_effort": effort}


class PredictedPart(msgspec.Struct):
    text: str
    type: Literal["text"] = "text"


class Prediction(msgspec.Struct):
    """Predicted outputs: text of which the answer may consist, so that it comes faster."""

    content: str | list[PredictedPart]
    type: Literal["content"] = "content"

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(SamplingBody, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1, le=MAX_COUNT)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, bounds("logprobs")] | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool | None = False  # the answer begins with the last message, if that has its role
    add_generation_prompt: bool | None = None  # true unless given, or the final message is continued
    continue_final_message: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolBody] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None  # these two: the older form of tools and tool_choice
    function_call: Any = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    generation_config: str | None = None  # JSON text of transformers' chat; the body's own fields come first
    thinking_token_budget: Annotated[int, Meta(ge=0)] | None = None  # vLLM's name: then the reasoning is ended
    prediction: Prediction | None = None

    def params(self, default_max_tokens: int | None) -> SamplingParams:
        if self.generation_config:
            for name, value in read_generation_config(self.generation_config).values().items():
                if getattr(self, name) is None:
                    setattr(self, name, value)
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("top_logprobs", "needs logprobs: true")
        if self.max_tokens == 0:
            raise BadRequest("max_tokens", "must be at least 1")
        check_best_of(self.n or 1, self.best_of, bool(self.stream))
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        max_tokens = self.max_completion_tokens or self.max_tokens or default_max_tokens
        return self.sampling(logprobs, max_tokens, self.prompt_logprobs)

    @property
    def asked_tokens(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().asked_tokens

    def chat(self) -> ChatRequest:
        """Raises BadRequest naming the field."""
        is_continued = continues(self.continue_final_message, self.add_generation_prompt)
        if self.functions:
            raise BadRequest("functions", "is not supported; give tools")
        if self.function_call not in (None, "none", "auto"):
            raise BadRequest("function_call", "is not supported; give tool_choice")
        tools, choice = read_tools(self.tools, self.tool_choice)
        return ChatRequest(
            conversation_of(self.messages),
            tools,
            choice,
            self.parallel_tool_calls is not False,
            {**effort_values(self.reasoning_effort, self.verbosity), **template_values(self.chat_template_kwargs)},
            self.add_generation_prompt is not False and not is_continued,
            self.thinking_token_budget,
            is_continued,
            bool(self.echo),
        )


class CompletionBody(SamplingBody, kw_only=True):
    prompt: str | list[str | int | list[TokenId]]
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool | None = False
    logprobs: Annotated[int, bounds("logprobs")] | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None  # of texts; true unless given

    def params(self) -> SamplingParams:
        if self.suffix:
            raise BadRequest("suffix", "is not supported")
        check_best_of(self.n or 1, self.best_of, bool(self.stream))
        if self.max_tokens == 0 and not self.echo:
            raise BadRequest("max_tokens", "must be at least 1 unless echo is true")
        max_tokens = 16 if self.max_tokens is None else self.max_tokens
        counts = [count for count in (self.prompt_logprobs, self.logprobs if self.echo else None) if count is not None]
        return self.sampling(self.logprobs, max_tokens, max(counts, default=None))

    def texts_or_ids(self) -> list[str | list[int]]:
        """The prompts, one or many. Raises BadRequest."""
        return texts_or_ids(self.prompt, "prompt")


def check_best_of(n: int, best_of: int | None, is_stream: bool) -> None:
    """Raises BadRequest."""
    if best_of is not None and best_of < n:
        raise BadRequest("best_of", f"must be at least n ({n}), got {best_of}")
    if best_of is not None and best_of > n and is_stream:
        raise BadRequest("best_of", "cannot be streamed; leave out stream or best_of")


def continues(continue_final_message: bool | None, add_generation_prompt: bool | None) -> bool:
    """Whether the answer continues the last message. Raises BadRequest when a new one is asked for too."""
    if continue_final_message and add_generation_prompt:
        raise BadRequest("continue_final_message", "and add_generation_prompt cannot both be true")
    return bool(continue_final_message)


def texts_or_ids(given: str | list[str | int | list[TokenId]], field: str) -> list[str | list[int]]:
    """One or many. Raises BadRequest naming `field` when they are of mixed kinds or none."""
    if isinstance(given, str):
        return [given]
    texts = [item for item in given if isinstance(item, str)]
    ids = [item for item in given if isinstance(item, int)]
    lists = [item for item in given if isinstance(item, list)]
    if [bool(texts), bool(ids), bool(lists)].count(True) != 1:
        raise BadRequest(field, "must be a text, a list of texts, a list of token ids, or a list of such lists")
    return [ids] if ids else [*texts, *lists]


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise BadRequest("stop", f"takes up to {MAX_STOPS} strings, got {len(stops)}")
    return stops


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float]:
    found: dict[int, float] = {}
    for token, value in (bias or {}).items():
        if (token_id := whole(token)) is None:
            raise BadRequest("logit_bias", "its keys must be token ids")
        found[token_id] = value
    return found
