"""The bodies of OpenAI's /v1/responses: what they ask for, in the terms of a chat. Unknown keys are ignored.

Beyond OpenAI's own: top_k, min_p, repetition_penalty, frequency_penalty, presence_penalty, seed, stop, stop_token_ids,
ignore_eos, priority.
"""

from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvloom.engine.errors import BadRequest
from kvloom.engine.request import SamplingParams
from kvloom.server.api.openai_bodies import Message, Penalty, SamplingBody, TokenId, conversation_of, effort_values
from kvloom.server.api.responses_input import InputItem, messages_of
from kvloom.server.chat_request import ChatRequest
from kvloom.server.grammars import json_grammar, object_grammar
from kvloom.server.tools import Tool, ToolChoice, check_tools

LOGPROBS = "message.output_text.logprobs"
_INCLUDES = (LOGPROBS, "reasoning.encrypted_content")  # the latter has no effect: reasoning is shown as it is
_SHARED = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("seed", "stop", "stop_token_ids", "ignore_eos"),
)
_STATELESS = "is not supported: this server keeps no responses; send the conversation as input"
# what these may be: the values that switch them off
_NEUTRAL: dict[str, tuple[tuple[object, ...], str]] = {
    "previous_response_id": ((None,), _STATELESS),
    "conversation": ((None,), _STATELESS),
    "prompt": ((None,), "is not supported: this server keeps no prompts"),
    "background": ((None, False), "is not supported"),
    "max_tool_calls": ((None,), "is not supported"),
    "truncation": ((None, "disabled"), 'must be "disabled": no part of the input is left out'),
    "service_tier": ((None, "auto", "default"), 'must be "auto" or "default"'),
}


class TextFormat(msgspec.Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None  # answers follow the schema whether it says so or not

    def grammar(self) -> str:
        """What the answer must match, "" = anything. Raises BadRequest."""
        if self.type == "text":
            return ""
        if self.type == "json_object":
            return object_grammar()
        if self.schema is None:
            raise BadRequest("text.format.schema", "is required")
        return json_grammar(self.schema, "text.format.schema")


class Text(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(msgspec.Struct, kw_only=True):
    """`effort` is shown to the chat template as reasoning_effort; `summary` has no effect."""

    effort: str | None = None
    summary: str | None = None


class FunctionTool(msgspec.Struct, kw_only=True):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self, field: str) -> Tool:
        """Raises BadRequest for tools that OpenAI itself would run."""
        if self.type != "function":
            raise BadRequest(f"{field}.type", f"must be 'function'; {self.type!r} is not supported")
        return Tool(self.name, self.description or "", self.parameters, bool(self.strict), field)


class FunctionChoice(msgspec.Struct, kw_only=True):
    type: Literal["function"]
    name: str


class ResponsesBody(msgspec.Struct, kw_only=True):
    """`store` has no effect: nothing is kept, whatever it says. So have metadata (given back), user and the keys of
    OpenAI's own caches."""

    model: str | None = None
    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    include: list[str] | None = None
    text: Text | None = None
    reasoning: Reasoning | None = None
    stream: bool | None = False
    store: bool | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    max_tool_calls: int | None = None
    truncation: str | None = None
    service_tier: str | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Meta(ge=0, le=5)] | None = None  # 1 the most urgent; 0 = none

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def check(self) -> None:
        """Raises BadRequest for what this server cannot do, by name."""
        for name, (neutral, problem) in _NEUTRAL.items():
            if getattr(self, name) not in neutral:
                raise BadRequest(name, problem)
        for place, name in enumerate(self.include or ()):
            if name not in _INCLUDES:
                raise BadRequest(f"include[{place}]", f"{name!r} is not supported")
        if self.top_logprobs is not None and not self.wants_logprobs:
            raise BadRequest("top_logprobs", f"needs include: [{LOGPROBS!r}]")

    def params(self, default_max_tokens: int | None) -> SamplingParams:
        """Raises BadRequest naming the field."""
        logprobs = (self.top_logprobs or 0) if self.wants_logprobs else None
        shared = SamplingBody(**{name: getattr(self, name) for name in _SHARED})
        params = shared.sampling(logprobs, self.max_output_tokens or default_max_tokens, None)
        format = None if self.text is None else self.text.format
        return params if format is None else replace(params, grammar=format.grammar())

    def chat(self) -> ChatRequest:
        """Raises BadRequest naming the field."""
        tools = tuple(tool.tool(f"tools[{place}]") for place, tool in enumerate(self.tools or ()))
        choice: ToolChoice | None = None
        if isinstance(self.tool_choice, FunctionChoice):
            choice = ToolChoice("named", self.tool_choice.name)
        elif self.tool_choice is not None and (tools or self.tool_choice == "required"):
            choice = ToolChoice(self.tool_choice)
        return ChatRequest(
            self._messages(),
            tools,
            check_tools(tools, choice, "tool_choice"),
            self.parallel_tool_calls is not False,
            effort_values(None if self.reasoning is None else self.reasoning.effort),
        )

    def _messages(self) -> list[dict[str, Any]]:
        """Instructions and a system message that follows them are one."""
        items = [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        messages = messages_of(items)
        if self.instructions is not None:
            system = self.instructions
            if messages and messages[0].role == "system":
                system = f"{system}\n\n{messages.pop(0).content}"
            messages.insert(0, Message(role="system", content=system))
        if not messages:
            raise BadRequest("input", "holds no message")
        return conversation_of(messages)
