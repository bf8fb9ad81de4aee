"""A chat, neutral of any protocol: what is asked becomes what the engine runs, and what it answers is read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvloom.engine.errors import BadRequest
from kvloom.engine.request import Delta, SamplingParams
from kvloom.server.chat_events import ChatEvent, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart
from kvloom.server.chat_output import ChatOutput
from kvloom.server.chat_style import ChatStyle, style_of
from kvloom.server.generation import Answer, GenerationService
from kvloom.server.reasoning import END_THINK, THINK, ReasoningSplitter
from kvloom.server.tool_calls import make_parser
from kvloom.server.tool_grammars import tool_grammar
from kvloom.server.tool_prompt import with_tools_in_text
from kvloom.server.tools import Tool, ToolChoice, parsed_arguments


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """`messages` as OpenAI has them: role, content (a text), tool_calls of an assistant, tool_call_id of a tool.

    `tools` and `choice` have passed tools.check_tools. `template_values` go to the chat template.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = field(default_factory=lambda: ToolChoice("none"))
    is_parallel: bool = True  # several calls in one answer
    template_values: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    max_reasoning_tokens: int | None = None  # then the reasoning is ended; None = no limit


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """`params` have the grammar of the tools and the end of the reasoning in them."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    style: ChatStyle
    request: ChatRequest
    is_thinking: bool  # the prompt ends with <think>
    text: str  # that prompt_ids are

    def output(self) -> ChatOutput:
        """The reader of one choice."""
        reasoning = ReasoningSplitter(self.is_thinking) if self.style.is_thinking else None
        if self.request.choice.mode == "none":
            return ChatOutput(reasoning)
        calls = make_parser(self.style.form, {tool.name: tool.schema for tool in self.request.tools})
        return ChatOutput(reasoning, calls, None if self.request.is_parallel else 1)


def prepare(service: GenerationService, request: ChatRequest, params: SamplingParams) -> PreparedChat:
    """`params.grammar` is of the answer's text. Raises BadRequest naming the field."""
    tools = request.tools if request.choice.mode != "none" else ()
    card, tokenizer = service.card, service.tokenizer
    style = style_of(tokenizer.chat_template(bool(tools)), card.tool_parser, card.reasoning_parser)
    text = _render(service, style, request, tools)
    grammar = tool_grammar(style.form, tools, request.choice, request.is_parallel, params.grammar)
    is_limited = bool(grammar) or request.max_reasoning_tokens is not None
    end = text.rstrip()
    is_thinking = style.is_thinking and end.endswith(THINK)
    may_think = style.is_thinking and request.add_generation_prompt and not end.endswith(END_THINK)
    if may_think and not is_thinking and is_limited and request.template_values.get("enable_thinking") is not False:
        text, is_thinking = (
            f"{text}{THINK}\n",
            True,
        )  # where the reasoning ends matters, so where it begins must be known
    params = replace(params, grammar=grammar)
    if is_thinking and is_limited:
        params = replace(params, reasoning_end=END_THINK, max_reasoning_tokens=request.max_reasoning_tokens)
    return PreparedChat(
        tuple(tokenizer.encode(text, add_special_tokens=False)), params, style, request, is_thinking, text
    )


def _render(service: GenerationService, style: ChatStyle, request: ChatRequest, tools: Sequence[Tool]) -> str:
    """The prompt. Templates want arguments of earlier calls as an object; those that want a text get it."""
    known = [_with_arguments(message) for message in request.messages]
    if not style.takes_tools:
        known, tools = with_tools_in_text(known, tools), ()
    values = {**request.template_values, "add_generation_prompt": request.add_generation_prompt}
    apply = service.tokenizer.apply_chat_template
    plain = [tool.plain for tool in tools] or None
    try:
        return apply(known, tools=plain, **values)
    except BadRequest:
        if not any(message.get("tool_calls") for message in known):
            raise
        return apply([dict(message) for message in request.messages], tools=plain, **values)


def _with_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    parsed = [
        {**call, "function": {**call["function"], "arguments": parsed_arguments(call["function"]["arguments"])}}
        for call in calls
    ]
    return {**message, "tool_calls": parsed}


@dataclass(slots=True)
class ChatAnswer:
    """One choice, whole. calls: (name, arguments as JSON text)."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    num_reasoning_tokens: int = 0

    def add(self, event: ChatEvent) -> None:
        match event:
            case TextDelta(text):
                self.text += text
            case ReasoningDelta(text):
                self.reasoning += text
            case ToolCallStart(_, name):
                self.calls.append((name, ""))
            case ToolCallArguments(index, text):
                name, arguments = self.calls[index]
                self.calls[index] = (name, arguments + text)


def read_answer(chat: PreparedChat, answer: Answer) -> ChatAnswer:
    """What the stream of the same choice would have given, joined."""
    output, found = chat.output(), ChatAnswer()
    texts = answer.token_texts
    rest = answer.text[sum(map(len, texts)) :]
    deltas = [Delta("", text, (token,)) for text, token in zip(texts, answer.token_ids, strict=True)]
    for delta in [*deltas, Delta("", rest, finish_reason=answer.finish_reason)]:
        for event in output.add(delta):
            found.add(event)
    found.num_reasoning_tokens = output.num_reasoning_tokens
    return found
