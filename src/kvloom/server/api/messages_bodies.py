"""The bodies of Anthropic's /v1/messages: what they ask for, in the terms of a chat. Unknown keys are ignored.

Beyond Anthropic's own: seed, ignore_eos, priority.
"""

from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvloom.engine.errors import BadRequest
from kvloom.engine.request import SamplingParams
from kvloom.server.api.openai_bodies import Message, conversation_of
from kvloom.server.generation import TokenizerLike
from kvloom.server.grammars import json_grammar

MAX_STOPS = 16


class Block(msgspec.Struct, kw_only=True):
    """A part of a message. `cache_control` has no effect: every prefix is cached."""

    type: str
    text: str | None = None


class Turn(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class JsonFormat(msgspec.Struct, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    """`effort` is shown to the chat template as reasoning_effort."""

    format: JsonFormat | None = None
    effort: str | None = None


class Thinking(msgspec.Struct, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class CountBody(msgspec.Struct, kw_only=True):
    """What makes the prompt: of count_tokens, and the beginning of a message's body."""

    model: str | None = None
    messages: Annotated[list[Turn], Meta(min_length=1)]
    system: str | list[Block] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    mcp_servers: list[Any] | None = None
    container: Any = None

    def check(self) -> None:
        """Raises BadRequest for what this server cannot do, by name."""
        if self.tools and not (isinstance(self.tool_choice, dict) and self.tool_choice.get("type") == "none"):
            raise BadRequest("tools", "is not supported; leave it out or set tool_choice to none")
        if self.thinking is not None and self.thinking.type == "enabled":
            raise BadRequest("thinking", "is not supported")
        for name in ("mcp_servers", "container"):
            if getattr(self, name):
                raise BadRequest(name, "is not supported")

    def prompt(self, tokenizer: TokenizerLike) -> tuple[int, ...]:
        """Token ids. A last message of the assistant is the beginning of the answer. Raises BadRequest."""
        turns = [
            Message(role=turn.role, content=_text_of(turn.content, f"messages[{place}].content"))
            for place, turn in enumerate(self.messages)
        ]
        begun = str(turns.pop().content) if turns[-1].role == "assistant" else ""
        if not turns:
            raise BadRequest("messages", "must hold one of the user")
        if self.system is not None:
            turns.insert(0, Message(role="system", content=_text_of(self.system, "system")))
        effort = None if self.output_config is None else self.output_config.effort
        values = {} if effort is None else {"reasoning_effort": effort}
        text = tokenizer.apply_chat_template(conversation_of(turns), add_generation_prompt=True, **values)
        return tuple(tokenizer.encode(text + begun, add_special_tokens=False))


class MessagesBody(CountBody, kw_only=True):
    """`metadata` and `service_tier` have no effect."""

    max_tokens: Annotated[int, Meta(ge=1)]
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Meta(ge=0, le=5)] | None = None  # 1 the most urgent; 0 = none

    def params(self) -> SamplingParams:
        """Raises BadRequest naming the field."""
        stops = self.stop_sequences or []
        if len(stops) > MAX_STOPS or not all(stops):
            raise BadRequest("stop_sequences", f"takes up to {MAX_STOPS} texts, none of them empty")
        if self.top_p == 0:
            raise BadRequest("top_p", "must be above 0; for greedy answers set temperature to 0")
        params = SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            max_tokens=self.max_tokens,
            stop=tuple(stops),
            seed=self.seed,
            ignore_eos=bool(self.ignore_eos),
        )
        format = None if self.output_config is None else self.output_config.format
        grammar = "" if format is None else json_grammar(format.schema, "output_config.format.schema")
        return replace(params, grammar=grammar) if grammar else params


def _text_of(content: str | list[Block], field: str) -> str:
    """Raises BadRequest for what is no text; earlier thinking is left out, as templates leave it out."""
    if isinstance(content, str):
        return content
    texts = []
    for place, block in enumerate(content):
        if block.type in ("thinking", "redacted_thinking"):
            continue
        if block.type != "text" or block.text is None:
            raise BadRequest(f"{field}[{place}]", f"must be a text block; {block.type!r} is not supported")
        texts.append(block.text)
    return "\n".join(texts)
