"""OpenAI request bodies and what they mean. Unknown keys are ignored, as OpenAI does; known ones are checked.

Beyond OpenAI's own: top_k, min_p, typical_p, repetition_penalty, ignore_eos, stop_token_ids, min_tokens,
skip_special_tokens, include_stop_str_in_output, priority, structured_outputs, guided_* (the names vLLM gave them).
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvloom.engine.errors import BadRequest
from kvloom.engine.request import SamplingParams
from kvloom.server.api.openai_tools import CallBody, NamedChoice, ToolBody, read_tools
from kvloom.server.api.openai_unsupported import Unsupported
from kvloom.server.chat_request import ChatRequest
from kvloom.server.grammars import choice_grammar, json_grammar, object_grammar, regex_grammar, text_grammar

MAX_STOPS = 4
MAX_CHOICES = 128
Penalty = Annotated[float, Meta(ge=-2, le=2)]
TokenId = Annotated[int, Meta(ge=0)]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class JsonSchema(msgspec.Struct, kw_only=True):
    """OpenAI's json_schema; answers follow the schema whether `strict` says so or not."""

    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def grammar(self) -> str:
        """Raises BadRequest."""
        if self.type == "json_object":
            return object_grammar()
        if self.json_schema is None or self.json_schema.schema is None:
            raise BadRequest("response_format.json_schema", "is required, with a schema")
        return json_grammar(self.json_schema.schema, "response_format.json_schema.schema")


class StructuredOutputs(msgspec.Struct):
    """vLLM's structured_outputs."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


def _guides(outputs: StructuredOutputs, prefix: str) -> dict[str, Callable[[], str]]:
    """What is given, by its field: a function that makes the grammar. Raises BadRequest when called."""
    found: dict[str, Callable[[], str]] = {}
    if outputs.json is not None:
        found[prefix + "json"] = partial(json_grammar, outputs.json, prefix + "json")
    if outputs.regex is not None:
        found[prefix + "regex"] = partial(regex_grammar, outputs.regex, prefix + "regex")
    if outputs.choice is not None:
        found[prefix + "choice"] = partial(choice_grammar, outputs.choice, prefix + "choice")
    if outputs.grammar is not None:
        found[prefix + "grammar"] = partial(text_grammar, outputs.grammar, prefix + "grammar")
    if outputs.json_object:
        found[prefix + "json_object"] = object_grammar
    return found


class SamplingBody(Unsupported, kw_only=True):
    """What chat and text completions share."""

    model: str | None = None
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: Annotated[int, Meta(ge=0, le=5)] | None = None  # 1 the most urgent; 0 = none
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None  # requests of different salts share no cached prompts
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    return_token_ids: bool | None = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None  # vLLM's older names of the same
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    def sampling(self, logprobs: int | None, max_tokens: int | None, prompt_logprobs: int | None) -> SamplingParams:
        """Raises BadRequest naming the field."""
        self.refuse_unsupported_fields()
        if self.prompt_logprobs is not None and self.stream:
            raise BadRequest("prompt_logprobs", "cannot be streamed; leave out stream or prompt_logprobs")
        if self.top_p is not None and self.top_p == 0:
            raise BadRequest("top_p", "must be above 0; for greedy answers set temperature to 0")
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            min_p=self.min_p or 0.0,
            typical_p=self.typical_p or 1.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            logit_bias=_logit_bias(self.logit_bias),
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            stop=_stops(self.stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            include_stop=bool(self.include_stop_str_in_output),
            ignore_eos=bool(self.ignore_eos),
            seed=self.seed,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            skip_special_tokens=self.skip_special_tokens is not False,
            grammar=self._grammar(),
        )

    def _grammar(self) -> str:
        """What the answer must match, "" = anything. Raises BadRequest: a wrong one, or more than one."""
        guided = StructuredOutputs(self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        found = {
            **_guides(self.structured_outputs or StructuredOutputs(), "structured_outputs."),
            **_guides(guided, "guided_"),
        }
        format = self.response_format
        if format is not None and format.type != "text":
            found["response_format"] = format.grammar
        if len(found) > 1:
            raise BadRequest(min(found), f"and {max(found)} are both given; give one")
        return next(iter(found.values()))() if found else ""

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        return self.wants_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class Part(msgspec.Struct):
    type: str
    text: str | None = None


class Message(msgspec.Struct, omit_defaults=True):
    """What a chat template sees of a message."""

    role: str = msgspec.field(default="user")
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[CallBody] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


def conversation_of(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as the template takes them: content a string. Raises BadRequest for parts that are no text."""
    found = []
    for i, message in enumerate(messages):
        plain = msgspec.to_builtins(message)
        plain["role"] = message.role
        plain["content"] = _text_of(message.content, f"messages[{i}].content")
        if message.reasoning is not None:
            plain.setdefault("reasoning_content", message.reasoning)
        found.append(plain)
    return found


def template_values(given: dict[str, Any] | None) -> dict[str, Any]:
    """chat_template_kwargs. Raises BadRequest when they hold what the request itself says."""
    for name in ("messages", "tools", "add_generation_prompt", "self"):
        if name in (given or {}):
            raise BadRequest("chat_template_kwargs", f"must not hold {name}")
    return given or {}


def effort_values(effort: str | None) -> dict[str, Any]:
    """How much to think, as templates know it."""
    if effort == "none":
        return {"enable_thinking": False}
    return {} if effort is None else {"reasoning_effort": effort}


class ChatBody(SamplingBody, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolBody] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    thinking_token_budget: Annotated[int, Meta(ge=0)] | None = None  # vLLM's name: then the reasoning is ended

    def params(self, default_max_tokens: int | None) -> SamplingParams:
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequest("top_logprobs", "needs logprobs: true")
        if self.max_tokens == 0:
            raise BadRequest("max_tokens", "must be at least 1")
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        max_tokens = self.max_completion_tokens or self.max_tokens or default_max_tokens
        return self.sampling(logprobs, max_tokens, self.prompt_logprobs)

    def chat(self) -> ChatRequest:
        """Raises BadRequest naming the field."""
        if self.functions:
            raise BadRequest("functions", "is not supported; give tools")
        tools, choice = read_tools(self.tools, self.tool_choice)
        return ChatRequest(
            conversation_of(self.messages),
            tools,
            choice,
            self.parallel_tool_calls is not False,
            {**effort_values(self.reasoning_effort), **template_values(self.chat_template_kwargs)},
            self.add_generation_prompt is not False,
            self.thinking_token_budget,
        )


class CompletionBody(SamplingBody, kw_only=True):
    prompt: str | list[str | int | list[TokenId]]
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool | None = False
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None  # of texts; true unless given

    def params(self) -> SamplingParams:
        if self.suffix:
            raise BadRequest("suffix", "is not supported")
        n, best_of = self.n or 1, self.best_of or self.n or 1
        if best_of < n:
            raise BadRequest("best_of", f"must be at least n ({n}), got {best_of}")
        if best_of > n and self.stream:
            raise BadRequest("best_of", "cannot be streamed; leave out stream or best_of")
        if self.max_tokens == 0 and not self.echo:
            raise BadRequest("max_tokens", "must be at least 1 unless echo is true")
        max_tokens = 16 if self.max_tokens is None else self.max_tokens
        counts = [count for count in (self.prompt_logprobs, self.logprobs if self.echo else None) if count is not None]
        return self.sampling(self.logprobs, max_tokens, max(counts, default=None))

    def texts_or_ids(self) -> list[str | list[int]]:
        """The prompts, one or many. Raises BadRequest."""
        return texts_or_ids(self.prompt, "prompt")


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


def _text_of(content: str | list[Part] | None, field: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for i, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise BadRequest(f"{field}[{i}]", f"must be a text part; {part.type!r} is not supported")
    return "\n".join(part.text or "" for part in content)


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise BadRequest("stop", f"takes up to {MAX_STOPS} strings, got {len(stops)}")
    return stops


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float]:
    try:
        return {int(token): value for token, value in (bias or {}).items()}
    except ValueError:
        raise BadRequest("logit_bias", "its keys must be token ids") from None
