"""Bodies of Ollama's /api/chat and /api/generate, translated into prompt, sampling and reader of the answer.

Unknown keys are ignored, as Ollama does; known ones that ask for what is not here are refused by name. What the answer
must match is its `format`, or as constraints.py has it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvloom.contract.errors import BadRequest
from kvloom.contract.images import Sight
from kvloom.contract.sampling import SamplingParams
from kvloom.server.chat.content import Content, content_of
from kvloom.server.chat.fit import prepare_fitting
from kvloom.server.chat.output import ChatOutput
from kvloom.server.chat.request import ChatRequest, PreparedChat, prepare, with_beginning
from kvloom.server.dialects.constraints import Constraints
from kvloom.server.dialects.ollama.options import NAMED, Options
from kvloom.server.dialects.openai.tools import CallFunction, ToolBody, read_tools
from kvloom.server.dialects.sampling import advised, bounds
from kvloom.server.serving.prompts import encode_text
from kvloom.server.serving.service import GenerationService
from kvloom.server.serving.vision.sources import source_of_base64

_DURATION = re.compile(r"-?(\d+(\.\d*)?(ns|us|µs|ms|s|m|h))+\Z|-?\d+\Z", re.ASCII)
_ZERO = re.compile(r"-?[0.]+[a-zµ]*\Z")
# permitted values of unsupported fields: those without effect
_NEUTRAL: dict[str, tuple[tuple[object, ...], str]] = {
    "shift": ((None, False), 'is not supported: an answer that fills the context ends with done_reason "length"'),
    "suffix": ((None, ""), "is not supported"),
    "template": ((None, ""), "is not supported: the model's own is used; or give the whole prompt, with raw true"),
}


@dataclass(frozen=True, slots=True)
class Asked:
    """A body's request to the engine. `output` reads the only answer."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    output: ChatOutput
    has_context: bool = False  # the prompt and the answer are given back as `context`
    sight: Sight | None = None  # the images of the prompt


class AskingBody(Constraints, kw_only=True):
    """Common fields of chat and generate. `keep_alive` has no effect: models stay loaded, see `unloads`."""

    model: Annotated[str, Meta(min_length=1)]
    stream: bool | None = None  # true unless given
    options: Options | None = None
    keep_alive: int | float | str | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    truncate: bool | None = None
    shift: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, bounds("logprobs")] | None = None

    @property
    def is_streamed(self) -> bool:
        return self.stream is not False

    @property
    def unloads(self) -> bool:
        """A load request with keep_alive 0 is answered as one that unloads; the model stays all the same.

        Raises BadRequest when keep_alive is not a duration.
        """
        value = self.keep_alive
        if isinstance(value, str) and not _DURATION.match(value):
            raise BadRequest("keep_alive", f'must be a duration as "5m" or a number of seconds, got {value[:40]!r}')
        return bool(_ZERO.match(value)) if isinstance(value, str) else value == 0

    def refuse_what_is_not_here(self) -> None:
        """Raises BadRequest."""
        for name, (neutral, problem) in _NEUTRAL.items():
            if getattr(self, name, None) not in neutral:
                raise BadRequest(name, problem)

    def sampling(self, service: GenerationService) -> SamplingParams:
        """Raises BadRequest naming the field."""
        options = self.options or Options()
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        params = options.sampling(service.engine.max_seq_len, logprobs, self.answer_grammar())
        return advised(params, options, service, NAMED.names)

    def template_values(self) -> dict[str, Any]:
        """How much to think, as templates know it."""
        if self.think is None:
            return {}
        level = {"reasoning_effort": self.think} if isinstance(self.think, str) else {}
        return {"enable_thinking": bool(self.think), **level}

    def prepared(self, service: GenerationService, request: ChatRequest) -> PreparedChat:
        """Raises BadRequest naming the field."""
        params, context = self.sampling(service), self.num_ctx(service)
        is_cut = self.truncate is not False and len(request.messages) > 1
        chat = prepare_fitting(service, request, params, context) if is_cut else prepare(service, request, params)
        if self.think and not chat.style.is_thinking:
            raise BadRequest("think", f"{self.model!r} does not support thinking")
        return chat

    def num_ctx(self, service: GenerationService) -> int:
        """Tokens that prompt and answer share. Raises BadRequest."""
        return (self.options or Options()).context(service.engine.max_seq_len)

    def bounded(self, service: GenerationService, asked: Asked) -> Asked:
        """The answer ends where num_ctx does. Raises BadRequest when the prompt does not fit."""
        context, used = self.num_ctx(service), len(asked.prompt_ids)
        if context == service.engine.max_seq_len:
            return asked
        if used >= context:
            raise BadRequest("options.num_ctx", f"is {context}, but the prompt has {used} tokens")
        left = context - used
        return replace(asked, params=replace(asked.params, max_tokens=min(asked.params.max_tokens or left, left)))


def with_images(images: Sequence[str] | None, text: str, field: str) -> Content:
    """`field`: of the message that has them. Raises BadRequest."""
    name = f"{field}.images" if field else "images"
    sources = [source_of_base64(data, "", f"{name}[{i}]") for i, data in enumerate(images or ())]
    return content_of([*sources, text])


class PastCall(msgspec.Struct, kw_only=True):
    """A call that an earlier answer of the conversation made."""

    function: CallFunction
    id: str = ""


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None  # in base64; they are shown before the text
    tool_calls: list[PastCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    def plain(self, field: str) -> dict[str, Any]:
        """As chat templates take it. Raises BadRequest."""
        content = with_images(self.images, self.content or "", field)
        message: dict[str, Any] = {"role": self.role.lower(), "content": content}
        if self.thinking:
            message |= {"reasoning": self.thinking, "reasoning_content": self.thinking}
        if self.tool_calls:
            message["tool_calls"] = [{"type": "function", **msgspec.to_builtins(call)} for call in self.tool_calls]
        if self.tool_name:
            message["name"] = self.tool_name
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        return message


class OllamaChat(AskingBody, kw_only=True):
    messages: list[ChatMessage] | None = None  # none: a load request
    tools: list[ToolBody] | None = None

    @property
    def loads(self) -> bool:
        return not self.messages

    def asked(self, service: GenerationService) -> Asked:
        """A last message of the assistant is the beginning of the answer. Raises BadRequest naming the field."""
        self.refuse_what_is_not_here()
        messages = [message.plain(f"messages[{i}]") for i, message in enumerate(self.messages or ())]
        begun = ""
        if messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
            begun = messages.pop()["content"]
            if not isinstance(begun, str):
                raise BadRequest(f"messages[{len(messages)}].images", "must not stand in the beginning of the answer")
        if not messages:
            raise BadRequest("messages", "must hold one that is not the assistant's")
        tools, choice = read_tools(self.tools, None)
        request = ChatRequest(messages, tools, choice, template_values=self.template_values())
        chat = self.prepared(service, request)
        if begun:
            if chat.is_thinking:
                raise BadRequest("messages", "must not end with one of the assistant while the model thinks")
            chat = with_beginning(service, chat, begun)
        return self.bounded(service, Asked(chat.prompt_ids, chat.params, chat.output(), sight=chat.sight))


class OllamaGenerate(AskingBody, kw_only=True):
    prompt: str | None = None  # none, or "": a load request
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: list[Annotated[int, Meta(ge=0)]] | None = None
    raw: bool | None = None
    images: list[str] | None = None

    @property
    def loads(self) -> bool:
        return not self.prompt

    def asked(self, service: GenerationService) -> Asked:
        """Raises BadRequest naming the field."""
        self.refuse_what_is_not_here()
        prompt = self.prompt or ""
        if self.raw:
            for name in ("system", "context", "think", "images"):
                if getattr(self, name):
                    raise BadRequest(name, "is not supported with raw, which gives the whole prompt")
            ids = encode_text(service, prompt, "prompt", service.max_input_tokens)
            return self.bounded(service, Asked(ids, self.sampling(service), ChatOutput()))
        system = [{"role": "system", "content": self.system}] if self.system else []
        if self.images and self.context:
            raise BadRequest("context", "does not go with images")
        messages: list[dict[str, Any]] = [*system, {"role": "user", "content": with_images(self.images, prompt, "")}]
        chat = self.prepared(service, ChatRequest(messages, template_values=self.template_values(), field="prompt"))
        ids = (*self._context(service), *chat.prompt_ids)
        asked = Asked(ids, chat.params, chat.output(), has_context=chat.sight is None, sight=chat.sight)
        return self.bounded(service, asked)

    def _context(self, service: GenerationService) -> list[int]:
        size = service.engine.info.vocab_size
        for i, token in enumerate(self.context or ()):
            if token >= size:
                raise BadRequest(f"context[{i}]", f"is {token}, outside the vocabulary of {size}")
        return self.context or []
