"""A chat, independent of any protocol: turns it into what the engine runs, and reads its answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvloom.contract.errors import BadRequest
from kvloom.contract.images import Sight
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.text.marks import Marks
from kvloom.server.chat.channels import Begun, ChannelReader
from kvloom.server.chat.content import joined, sources_of, text_of, with_parts, with_texts
from kvloom.server.chat.events import ChatEvent, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart
from kvloom.server.chat.form import NO_CALLS, ChatForm, Thinking
from kvloom.server.chat.history import shapes_of
from kvloom.server.chat.loose_calls import checks_of
from kvloom.server.chat.output import ChatOutput
from kvloom.server.chat.parts import reads_parts_alone
from kvloom.server.chat.place import Lead, lead_of
from kvloom.server.chat.reasoning import ReasoningSplitter
from kvloom.server.chat.showing import as_shown
from kvloom.server.chat.style import form_of, led, takes_parts
from kvloom.server.chat.tool_calls import ToolCall, make_parser
from kvloom.server.chat.tool_grammars import has_grammar, tool_grammar
from kvloom.server.chat.tools import Tool, ToolChoice, with_parsed
from kvloom.server.serving.prompts import Marked, check_length, encode_marked, request_limit
from kvloom.server.serving.service import GenerationService
from kvloom.server.serving.vision.seen import Look, seen_of
from kvloom.server.serving.vision.sources import MAX_IMAGES, ImageSource


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """`messages` in OpenAI's form: role, content (a content.Content), tool_calls, and tool_call_id of a tool's.

    `tools` and `choice` have passed tools.check_tools. `template_values` go to the chat template.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = field(default_factory=lambda: ToolChoice("none"))
    is_parallel: bool = True  # several calls in one answer are allowed
    template_values: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    max_reasoning_tokens: int | None = None  # tokens of reasoning before its end is forced; None = no limit
    is_continued: bool = False  # the answer continues the last message, which stays open
    is_echoing: bool = False  # the answer begins with the last message's content, if that has the answer's role
    field: str = "messages"  # the field named by errors
    add_special_tokens: bool = False  # special tokens around any text, in addition to the template's
    is_counted: bool = False  # tokens are only counted: request_limit bounds the prompt, not the context
    is_direct: bool = False  # the answer's text begins at once: there is no reasoning; see place.py

    @property
    def role(self) -> str:
        """Role of the answer: without a generation prompt, the last message's."""
        return "assistant" if self.add_generation_prompt else self.messages[-1]["role"]

    @property
    def echo(self) -> str:
        """The text that the answer begins with."""
        last = self.messages[-1]
        return text_of(last["content"]) if self.is_echoing and last["role"] == self.role else ""


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """`params` include the grammar of the tools and the end of the reasoning."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    style: ChatForm
    tools: tuple[Tool, ...]
    choice: ToolChoice
    is_parallel: bool
    is_thinking: bool  # the prompt ends with <think>
    role: str = "assistant"  # role of the answer
    echo: str = ""  # what the answer begins with
    sight: Sight | None = None  # the images of the prompt
    is_begun: bool = False  # the prompt ends within the answer
    is_free: bool = True  # the answer's text has no format

    @property
    def customs(self) -> frozenset[str]:
        """Names of the tools whose only argument is answered as a text."""
        return frozenset(tool.name for tool in self.tools if tool.is_custom)

    def output(self) -> ChatOutput:
        """A reader for one choice."""
        style, may_call = self.style, self.choice.mode != "none"
        schemas = {tool.name: tool.schema for tool in self.tools} if may_call else {}
        max_calls = None if self.is_parallel or not may_call else 1
        has_text = self.choice.mode in ("auto", "none")
        if style.channels is not None:
            begun: Begun = "reasoning" if self.is_thinking else "text" if self.is_begun else "header"
            return ChatOutput(None, ChannelReader(style.channels, schemas, begun), max_calls, has_text)
        breaks = style.breaks if may_call else ()
        call = ToolCall(style.calls, schemas) if may_call and style.calls.begin else None
        reasoning = ReasoningSplitter(self.is_thinking, style.thinking, breaks, call) if style.thinking else None
        if not may_call:
            return ChatOutput(reasoning, make_parser(NO_CALLS, {}, style.hidden) if style.specials else None)
        loose = checks_of(self.tools) if self.choice.mode == "auto" and self.is_free else {}
        calls = make_parser(style.calls, schemas, style.hidden, loose)
        return ChatOutput(reasoning, calls, max_calls, has_text)


def prepare(service: GenerationService, request: ChatRequest, params: SamplingParams) -> PreparedChat:
    """`params.grammar` is that of the answer's text. Raises BadRequest that names the field."""
    if not request.is_counted:
        service.check_writes(request.field)
    request = replace(request, messages=with_parsed(request.messages))
    tools = request.tools if request.choice.mode != "none" else ()
    sources = _sources(service, request)
    card, tokenizer = service.card, service.tokenizer
    style = form_of(tokenizer, bool(tools), card.tool_parser, card.reasoning_parser)
    limit = request_limit(service) if request.is_counted else service.max_input_tokens
    marks = _marks(service, request.messages, [tool.plain for tool in tools], request.template_values)
    text = marks.spelt_out(_render(service, style, marks, request, tools))
    if request.is_continued:
        text = _continued(text)
    if request.is_direct:
        text += lead_of(tokenizer, style.thinking).marks
    is_limited = has_grammar(tools, request.choice, params.grammar) or request.max_reasoning_tokens is not None
    text, is_thinking = _opened(style, request, text, is_limited)
    calls, is_free = led(style, text, is_thinking), not params.grammar
    grammar = tool_grammar(calls, tools, request.choice, request.is_parallel, params.grammar)
    thinking = style.thinking
    params = replace(params, grammar=grammar)
    if style.specials:
        params = replace(params, skip_special_tokens=False)
    if thinking and is_thinking and is_limited:
        params = replace(params, reasoning_end=thinking.end, max_reasoning_tokens=request.max_reasoning_tokens)
    ids = encode_marked(service, Marked(text, marks.originals), request.field, limit, request.add_special_tokens)
    sight = None
    if sources:
        seen = seen_of(Look(service, ids, sources))
        check_length(service, seen.prompt_ids, request.field, limit)
        ids, sight = seen.prompt_ids, seen.sight
    shown = (request.tools, request.choice, request.is_parallel, is_thinking, request.role, request.echo, sight)
    return PreparedChat(ids, params, replace(style, calls=calls), *shown, request.is_continued, is_free)


def _opened(style: ChatForm, request: ChatRequest, text: str, is_limited: bool) -> tuple[str, bool]:
    """The prompt, and whether the answer begins within its reasoning. Where the end of the reasoning matters its
    beginning must be known: then it is added.
    """
    thinking, end = style.thinking, text.rstrip()
    if thinking is None:
        return text, False
    if end.endswith(thinking.begin) or _thinks_on(request, thinking):
        return text, True
    may_think = request.add_generation_prompt and not end.endswith((thinking.end, style.before_text or thinking.end))
    if may_think and is_limited and request.template_values.get("enable_thinking") is not False:
        return f"{text}{thinking.begin}{thinking.gap}", True
    return text, False


def rendered(service: GenerationService, request: ChatRequest) -> tuple[Marked, tuple[ImageSource, ...]]:
    """The prompt of a chat without tools as a text, and its images. Raises BadRequest that names the field."""
    service.check_writes(request.field)
    request = replace(request, messages=with_parsed(request.messages))
    sources = _sources(service, request)
    card, tokenizer = service.card, service.tokenizer
    style = form_of(tokenizer, False, card.tool_parser, card.reasoning_parser)
    marks = _marks(service, request.messages, request.template_values)
    text = marks.spelt_out(_render(service, style, marks, request, ()))
    if request.is_direct:
        text += lead_of(tokenizer, style.thinking).marks
    return Marked(text, marks.originals), sources


def lead(service: GenerationService) -> Lead:
    """What comes between a prompt and an answer that begins at once."""
    card, tokenizer = service.card, service.tokenizer
    return lead_of(tokenizer, form_of(tokenizer, False, card.tool_parser, card.reasoning_parser).thinking)


def with_beginning(service: GenerationService, chat: PreparedChat, text: str, is_counted: bool = False) -> PreparedChat:
    """The chat whose answer continues `text`. Raises PromptTooLong."""
    if chat.style.channels is not None:
        text = chat.style.calls.text_lead + text
    limit = request_limit(service) if is_counted else service.max_input_tokens
    marks = _marks(service, text)
    more = encode_marked(service, Marked(marks.mark(text), marks.originals), "messages", limit)
    return replace(chat, prompt_ids=(*chat.prompt_ids, *more), is_begun=True)


def _sources(service: GenerationService, request: ChatRequest) -> tuple[ImageSource, ...]:
    """The images of a chat. Raises BadRequest when the model takes none, or there are too many."""
    sources = sources_of(request.messages)
    if sources and not service.engine.info.sees:
        raise BadRequest(sources[0].name, f"the model {service.name!r} takes no images")
    if len(sources) > MAX_IMAGES:
        raise BadRequest(sources[MAX_IMAGES].name, f"is one more than the {MAX_IMAGES} images that a request may have")
    return sources


def _marks(service: GenerationService, *values: Any) -> Marks:
    """Marks for users' texts; none where special tokens in them are allowed."""
    is_text = not service.card.parses_special_text
    return Marks(service.tokenizer.special_texts if is_text else frozenset(), values)


def _render(
    service: GenerationService, style: ChatForm, marks: Marks, request: ChatRequest, called: Sequence[Tool]
) -> str:
    """The prompt, marked. Raises BadRequest with what the template says."""
    messages = marks.mark(request.messages)
    if request.is_continued:
        if messages[-1].get("tool_calls"):
            raise BadRequest("continue_final_message", "cannot be done: the message ends with tool calls")
        messages = _open_end(messages)
    tools = [marks.mark(tool.plain) for tool in called if tool.is_listed]
    known, shown = as_shown(service.tokenizer, style, messages, tools, request.field)
    values = {**marks.mark(request.template_values), "add_generation_prompt": request.add_generation_prompt}
    problem: BadRequest | None = None
    for shape in shapes_of(style.kept, known):
        try:
            return service.tokenizer.apply_chat_template(_formed(service, shape), tools=shown or None, **values)
        except BadRequest as error:
            problem = problem or error
    assert problem is not None
    raise problem


def _formed(service: GenerationService, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages in the form that the model's template takes. Raises BadRequest when it takes no images."""
    info = service.engine.info
    if not info.sees and reads_parts_alone(service.tokenizer):
        return with_parts(messages)
    if not info.sees:
        return [dict(message) for message in messages]
    if takes_parts(service.tokenizer):
        return with_parts(messages)
    if not info.image_text and (sources := sources_of(messages)):
        raise BadRequest(sources[0].name, "this model's chat template takes no images")
    return with_texts(messages, info.image_text)


def _thinks_on(request: ChatRequest, thinking: Thinking) -> bool:
    """Whether the message to be continued ends within its reasoning."""
    text = text_of(request.messages[-1]["content"])
    return request.is_continued and text.rfind(thinking.begin) > text.rfind(thinking.end)


# put at the end of a message that is continued, in order to find it in the rendered prompt
_OPEN_END = "\uf8ff\ue0c0\uf8fe"


def _open_end(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [*messages[:-1], {**messages[-1], "content": joined(messages[-1]["content"], _OPEN_END)}]


def _continued(text: str) -> str:
    """The prompt up to the end of its last message. Raises BadRequest when the template does not render that."""
    before, mark, _ = text.rpartition(_OPEN_END)
    if not mark:
        raise BadRequest("continue_final_message", "cannot be done: this model's chat template leaves out the message")
    return before


@dataclass(slots=True)
class ChatAnswer:
    """One choice, whole. calls: (name, arguments as JSON text)."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

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
