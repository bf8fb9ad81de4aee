"""Bodies of Anthropic's /v1/messages, translated into a chat. Unknown keys are ignored.

Beyond Anthropic's own: seed, ignore_eos, priority.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvloom.contract.errors import BadRequest
from kvloom.contract.sampling import SamplingParams
from kvloom.server.chat.request import ChatRequest, PreparedChat, prepare, with_beginning
from kvloom.server.chat.tools import ToolChoice, check_tools
from kvloom.server.dialects.anthropic.input import Block, Turn, messages_of, system_text, text_of
from kvloom.server.dialects.anthropic.tools import ToolBody, read_tools
from kvloom.server.dialects.constraints import Constraints, OutputFormat
from kvloom.server.dialects.openai.bodies import effort_values
from kvloom.server.dialects.openai.messages import Said, conversation_of
from kvloom.server.dialects.sampling import Named, bounds
from kvloom.server.serving.service import GenerationService

MAX_STOPS = 16


class OutputConfig(msgspec.Struct, kw_only=True):
    """`effort` is shown to the chat template as reasoning_effort."""

    format: OutputFormat | None = None
    effort: str | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """Other types than enabled and disabled: as the model itself decides. `display`: "omitted" shows no text of it. A
    model that does not think is asked in vain.
    """

    type: str
    display: str | None = None
    budget_tokens: Annotated[int, Meta(ge=0)] | None = None  # with reasoning enabled: tokens after which it is ended

    def values(self) -> dict[str, Any]:
        """For the chat template. Raises BadRequest."""
        if self.type == "enabled" and self.budget_tokens is None:
            raise BadRequest("thinking.budget_tokens", "is required")
        return {"enable_thinking": self.type == "enabled"} if self.type in ("enabled", "disabled") else {}


class Choice(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None  # of a tool
    disable_parallel_tool_use: bool | None = None

    def choice(self) -> ToolChoice:
        """Raises BadRequest."""
        if self.type == "tool":
            if self.name is None:
                raise BadRequest("tool_choice.name", "is required")
            return ToolChoice("named", self.name)
        return ToolChoice("required" if self.type == "any" else self.type)


class CountBody(Constraints, kw_only=True):
    """The part of a body that determines the prompt: all of count_tokens', the beginning of a message's. Constraints
    are no part of it.
    """

    model: str | None = None
    messages: Annotated[list[Turn], Meta(min_length=1)]
    system: str | list[Block] | None = None
    tools: list[ToolBody] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    mcp_servers: list[Any] | None = None
    container: Any = None

    def prepared(self, service: GenerationService, params: SamplingParams, is_counted: bool = False) -> PreparedChat:
        """A last message of the assistant is the beginning of the answer. Raises BadRequest naming the field."""
        for name in ("mcp_servers", "container"):
            if getattr(self, name):
                raise BadRequest(name, "is not supported")
        turns = self.messages
        begun = ""
        if turns[-1].role == "assistant":
            turns, begun = turns[:-1], text_of(turns[-1].content, f"messages[{len(turns) - 1}].content")
        if not turns:
            raise BadRequest("messages", "must hold one of the user")
        chat = prepare(service, replace(self._chat(turns), is_counted=is_counted), params)
        if not begun:
            return chat
        if chat.is_thinking:
            raise BadRequest("messages", "must not end with one of the assistant while the model thinks")
        return with_beginning(service, chat, begun, is_counted)

    def _chat(self, turns: Sequence[Turn]) -> ChatRequest:
        known = read_tools(self.tools or ())
        choice = None if self.tool_choice is None else self.tool_choice.choice()
        messages = messages_of(turns, known)
        if self.system is not None:
            messages.insert(0, Said(role="system", content=system_text(self.system)))
        tools = known.visible()
        thinking = self.thinking
        return ChatRequest(
            conversation_of(messages),
            tools,
            check_tools(tools, choice, "tool_choice"),
            not (self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use),
            {
                **effort_values(None if self.output_config is None else self.output_config.effort),
                **({} if thinking is None else thinking.values()),
            },
            max_reasoning_tokens=thinking.budget_tokens
            if thinking is not None and thinking.type == "enabled"
            else None,
        )


class MessagesBody(CountBody, kw_only=True):
    """`metadata` and `service_tier` have no effect. `max_tokens` 0: the prompt is computed and cached, no answer."""

    max_tokens: Annotated[int, Meta(ge=0)]
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    temperature: Annotated[float, bounds("temperature", high=1)] | None = None
    top_p: Annotated[float, bounds("top_p", opens_low=False)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    seed: Annotated[int, bounds("seed")] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Meta(ge=0, le=5)] | None = None  # 1 the most urgent; 0 = none

    def params(self) -> SamplingParams:
        """Raises BadRequest naming the field."""
        stops = self.stop_sequences or []
        if len(stops) > MAX_STOPS or not all(stops):
            raise BadRequest("stop_sequences", f"takes up to {MAX_STOPS} texts, none of them empty")
        if self.top_p == 0:
            raise BadRequest("top_p", "must be above 0; for greedy answers set temperature to 0")
        most = max(1, self.max_tokens)  # without a token wanted no prompt would be computed
        params = _NAMED.params(self, max_tokens=most, stop=tuple(stops))
        format = None if self.output_config is None else self.output_config.format
        field = "output_config.format"
        own = {} if format is None else {field: partial(format.answer_grammar, field)}
        return replace(params, grammar=self.answer_grammar(own=own))


_NAMED = Named(MessagesBody)
