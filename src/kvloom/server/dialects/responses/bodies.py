"""Bodies of OpenAI's /v1/responses, translated into a chat. Unknown keys are ignored.

Beyond OpenAI's own: top_k, min_p, repetition_penalty, frequency_penalty, presence_penalty, seed, stop, stop_token_ids,
ignore_eos, priority.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvloom.contract.config import MAX_COUNT
from kvloom.contract.errors import BadRequest
from kvloom.contract.sampling import SamplingParams
from kvloom.server.chat.grammars import json_grammar, object_grammar
from kvloom.server.chat.request import ChatRequest
from kvloom.server.dialects.constraints import Constraints
from kvloom.server.dialects.openai.bodies import SamplingBody, TokenId, effort_values
from kvloom.server.dialects.openai.messages import Said, conversation_of
from kvloom.server.dialects.responses.input import FOUND, REFERENCE, InputItem, messages_of
from kvloom.server.dialects.responses.tools import Choice, Tools
from kvloom.server.dialects.sampling import Named, bounds
from kvloom.server.serving.notes import note

LOGPROBS = "message.output_text.logprobs"
# the others have no effect: reasoning is always shown as generated, and no tool runs here
_INCLUDES = (
    *(LOGPROBS, "reasoning.encrypted_content", "message.input_image.image_url"),
    *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
    *("computer_call_output.output.image_url", "code_interpreter_call.outputs"),
)
# permitted values of unsupported fields: those that switch them off
_NEUTRAL: dict[str, tuple[tuple[object, ...], str]] = {
    "prompt": ((None,), "is not supported: this server keeps no prompts"),
    "background": ((None, False), "is not supported"),
}


class TextFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None  # of a json_object too, as in other servers
    description: str | None = None
    strict: bool | None = None  # answers follow the schema whether it says so or not, in full if it says so

    def grammar(self) -> str:
        """What the answer must match, "" = anything. Raises BadRequest."""
        if self.type == "text":
            if self.schema is not None:
                raise BadRequest("text.format.schema", "does not go with the type 'text'")
            return ""
        if self.schema is None:
            if self.type == "json_object":
                return object_grammar("text.format")
            raise BadRequest("text.format.schema", "is required")
        return json_grammar(self.schema, "text.format.schema", self.strict is True)


class Text(msgspec.Struct, kw_only=True):
    """`verbosity` is shown to the chat template by this name."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(msgspec.Struct, kw_only=True):
    """`effort` is shown to the chat template as reasoning_effort; `summary` has no effect."""

    effort: str | None = None
    summary: str | None = None


class ConversationChoice(msgspec.Struct, kw_only=True):
    id: str


class ResponsesBody(Constraints, kw_only=True):
    """`store`, true unless given, has no effect where the server has no store; the answer says whether it is kept.

    Without effect: metadata, which is given back; user and the keys of OpenAI's own caches; service_tier, for there is
    one; max_tool_calls, which is of tools that OpenAI itself runs.
    """

    model: str | None = None
    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=MAX_COUNT)] | None = None
    temperature: Annotated[float, bounds("temperature", high=2)] | None = None
    top_p: Annotated[float, bounds("top_p", opens_low=False)] | None = None
    top_logprobs: Annotated[int, bounds("logprobs")] | None = None
    include: list[str] | None = None
    text: Text | None = None
    reasoning: Reasoning | None = None
    stream: bool | None = False
    store: bool | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Choice | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationChoice | None = None
    prompt: Any = None
    background: bool | None = None
    max_tool_calls: Annotated[int, Meta(ge=1)] | None = None
    truncation: Literal["auto", "disabled"] | None = None  # auto: the oldest items are left out of a long input
    service_tier: str | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, bounds("min_p")] | None = None
    repetition_penalty: Annotated[float, bounds("repetition_penalty")] | None = None
    frequency_penalty: Annotated[float, bounds("frequency_penalty")] | None = None
    presence_penalty: Annotated[float, bounds("presence_penalty")] | None = None
    seed: Annotated[int, bounds("seed")] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Meta(ge=0, le=5)] | None = None  # 1 the most urgent; 0 = none

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @property
    def conversation_id(self) -> str:
        """Empty without one."""
        chosen = self.conversation
        return chosen.id if isinstance(chosen, ConversationChoice) else chosen or ""

    def check(self) -> None:
        """Raises BadRequest that names an unsupported option."""
        for name, (neutral, problem) in _NEUTRAL.items():
            if getattr(self, name) not in neutral:
                raise BadRequest(name, problem)
        for index, name in enumerate(self.include or ()):
            if name not in _INCLUDES:
                note(f"include[{index}] has no effect: {name!r} is not known here")
        if self.top_logprobs and not self.wants_logprobs:
            raise BadRequest("top_logprobs", f"needs include: [{LOGPROBS!r}]")

    def put_referred(self, items: Sequence[InputItem]) -> None:
        """Put the items in place that the input only names, in their order."""
        found = iter(items)
        if not isinstance(self.input, str):
            self.input = [next(found) if item.type == REFERENCE else item for item in self.input]

    def params(self, default_max_tokens: int | None) -> SamplingParams:
        """Raises BadRequest naming the field."""
        logprobs = (self.top_logprobs or 0) if self.wants_logprobs else None
        shared = SamplingBody(**{name: getattr(self, name) for name in _SHARED})
        params = shared.sampling(logprobs, self.max_output_tokens or default_max_tokens, None)
        format = None if self.text is None else self.text.format
        grammar = "" if format is None else format.grammar()
        return replace(params, grammar=self.answer_grammar(own={"text.format": lambda: grammar} if grammar else {}))

    def chat(self, past: Sequence[InputItem] = ()) -> ChatRequest:
        """Of the items before these and these. Raises BadRequest naming the field."""
        tools = self.offered(past)
        shown, choice = tools.chosen(self.tool_choice)
        verbosity = None if self.text is None else self.text.verbosity
        return ChatRequest(
            self._messages(past),
            shown,
            choice,
            self.parallel_tool_calls is not False,
            effort_values(None if self.reasoning is None else self.reasoning.effort, verbosity),
            field="input",
        )

    def offered(self, past: Sequence[InputItem] = ()) -> Tools:
        """The tools, with those that searches of these items found. Raises BadRequest that names the field."""
        tools = Tools()
        tools.put(self.tools or (), "tools")
        for index, item in enumerate([*past, *([] if isinstance(self.input, str) else self.input)]):
            if item.type in FOUND and item.tools:
                tools.put(item.tools, f"input[{index - len(past)}].tools", is_found=True)
        return tools

    def _messages(self, past: Sequence[InputItem]) -> list[dict[str, Any]]:
        items = [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        messages = messages_of([*past, *items], num_past=len(past))
        if self.instructions is not None:
            messages.insert(0, Said(role="system", content=self.instructions))
        if not messages:
            raise BadRequest("input", "holds no message")
        return conversation_of(messages)


_SHARED = (*Named(ResponsesBody).names.values(), "stop")  # fields that mean what they mean in completions
