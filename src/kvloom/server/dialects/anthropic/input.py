"""The conversation of Anthropic's /v1/messages: turns of blocks, which become the messages of a chat.

Blocks that say nothing to a model here are left out, which a note tells.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from kvloom.contract.errors import BadRequest
from kvloom.server.chat.content import Content, content_of, joined
from kvloom.server.dialects.anthropic.tools import Tools
from kvloom.server.dialects.openai.messages import Said
from kvloom.server.dialects.openai.tools import CallBody, CallFunction
from kvloom.server.http.body import converted
from kvloom.server.serving.notes import note
from kvloom.server.serving.vision.sources import ImageSource, checked_type, source_of_base64, source_of_url


class Source(msgspec.Struct, kw_only=True):
    """Where an image or a document is."""

    type: str
    media_type: str | None = None  # these two of type base64; of a text, `data` is the text
    data: str | None = None
    url: str | None = None
    content: "str | list[Block] | None" = None  # of type content

    def source(self, field: str) -> ImageSource:
        """Of an image. Raises BadRequest."""
        if self.type == "base64":
            media_type = checked_type(_required(self.media_type, f"{field}.media_type"), f"{field}.media_type")
            return source_of_base64(_required(self.data, f"{field}.data"), media_type, f"{field}.data")
        if self.type == "url":
            return source_of_url(_required(self.url, f"{field}.url"), f"{field}.url")
        raise BadRequest(f"{field}.type", f"must be 'base64' or 'url'; {self.type!r} is not supported")


class Block(msgspec.Struct, kw_only=True):
    """A part of a turn. Each type has some of the fields, and types that are not known here may be among them.
    `cache_control` has no effect: every prefix is cached.
    """

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None  # of a tool_use
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None  # of a tool_result
    content: Any = None
    is_error: bool | None = None
    source: Any = None
    title: str | None = None  # of a document or a search_result
    context: str | None = None  # of a document
    tool_name: str | None = None  # of a tool_reference
    tool: dict[str, Any] | None = None  # of a tool_addition or tool_removal


class Turn(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


BILLING = "x-anthropic-billing-header:"  # a line of Claude Code to Anthropic, which differs from chat to chat


def system_text(system: str | list[Block]) -> str:
    """Raises BadRequest for content that is not text."""
    if isinstance(system, str):
        return system
    told = [_text(block, f"system[{index}]") for index, block in enumerate(system)]
    kept = [text for text in told if not text.startswith(BILLING)]
    if len(kept) < len(told):
        note(f"the line {BILLING} of the system prompt is left out")
    return "\n".join(kept)


def text_of(content: str | list[Block], field: str) -> str:
    """Raises BadRequest for content that is not text."""
    if isinstance(content, str):
        return content
    return "\n".join(_text(block, f"{field}[{index}]") for index, block in enumerate(content))


def messages_of(turns: Sequence[Turn], tools: Tools) -> list[Said]:
    """Results of tools are messages of their own, before the text of their turn; `tools` that a block names are found.
    Raises BadRequest naming the field.
    """
    reading = _Reading(tools)
    for index, turn in enumerate(turns):
        field = f"messages[{index}].content"
        if isinstance(turn.content, str):
            reading.messages.append(Said(role=turn.role, content=turn.content))
        elif turn.role == "assistant":
            reading.answer(turn.content, field)
        else:
            reading.question(turn, turn.content, field)
    return reading.messages


@dataclass(slots=True)
class _Reading:
    """The messages so far. `names`: of the tools that were called, by the id of the call."""

    tools: Tools
    messages: list[Said] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)

    def answer(self, blocks: list[Block], field: str) -> None:
        """Results among the blocks, of what ran elsewhere, end one message and begin another."""
        message, texts, thoughts, num_before = Said(role="assistant"), list[str](), list[str](), len(self.messages)

        def end() -> None:
            if texts or thoughts or message.tool_calls or len(self.messages) == num_before:
                message.content = "\n".join(texts)
                message.reasoning = "\n".join(thoughts) or None
                self.messages.append(message)

        for index, block in enumerate(blocks):
            at = f"{field}[{index}]"
            if block.type.endswith("tool_use"):
                message.tool_calls = [*(message.tool_calls or ()), self._call(block, at)]
            elif block.type.endswith("tool_result"):
                end()
                self.messages.append(self._result(block, at))
                message, texts, thoughts = Said(role="assistant"), [], []
            elif block.type == "thinking":
                thoughts.append(block.thinking or "")
            elif block.type != "redacted_thinking":  # encrypted, so that only Anthropic could read it
                texts += [item for item in self._items(block, at) if isinstance(item, str)]
        end()

    def question(self, turn: Turn, blocks: list[Block], field: str) -> None:
        items, num_before = list[str | ImageSource](), len(self.messages)
        for index, block in enumerate(blocks):
            at = f"{field}[{index}]"
            if block.type.endswith("tool_result"):
                self.messages.append(self._result(block, at))
            else:
                items += self._items(block, at)
        if items or len(self.messages) == num_before:
            self.messages.append(Said(role=turn.role, content=content_of(items)))

    def _call(self, block: Block, field: str) -> CallBody:
        id, name = _required(block.id, f"{field}.id"), _required(block.name, f"{field}.name")
        self.names[id] = name
        return CallBody(function=CallFunction(name=name, arguments=block.input or {}), id=id)

    def _result(self, block: Block, field: str) -> Said:
        """A failed tool's result says so in its text, because templates have no other way."""
        id = _required(block.tool_use_id, f"{field}.tool_use_id")
        content = self._content(block.content, f"{field}.content")
        content = joined("Error: ", content) if block.is_error else content
        return Said(role="tool", content=content, name=self.names.get(id), tool_call_id=id)

    def _content(self, content: Any, field: str) -> Content:
        """A text, blocks, or one block."""
        if content is None or isinstance(content, str):
            return content or ""
        if isinstance(content, dict) and "type" in content:
            return content_of(self._items(converted(content, Block, field), field, content))
        blocks = converted(content, list[Block], field)
        items = [self._items(block, f"{field}[{at}]", content[at]) for at, block in enumerate(blocks)]
        return content_of([item for each in items for item in each])

    def _items(self, block: Block, field: str, given: Mapping[str, Any] | None = None) -> list[str | ImageSource]:
        """What a block shows. `given`: of a block in a result, whose other types are shown as JSON."""
        match block.type:
            case "image":
                return [_source(block, field).source(f"{field}.source")]
            case "document":
                return [*filter(None, (block.title, block.context)), *self._document(block, field)]
            case "search_result":
                about = [text for text in (block.title, block.source) if isinstance(text, str)]
                found = self._content(block.content, f"{field}.content")
                return [*about, *([found] if isinstance(found, str) else found)]
            case "tool_reference":
                return [self.tools.find(_required(block.tool_name or block.name, f"{field}.tool_name"))]
            case "tool_search_tool_search_result":
                references = converted((given or {}).get("tool_references", []), list[Block], field)
                return [self.tools.find(each.tool_name or "") for each in references]
            case "tool_addition" | "tool_removal":
                return self._change(block, field)
        if block.text is not None:
            return [block.text]
        if isinstance(block.content, str | list) and block.content:
            inner = self._content(block.content, f"{field}.content")
            return [inner] if isinstance(inner, str) else list(inner)
        if given is not None:
            shown = {key: value for key, value in given.items() if not key.startswith("encrypted")}
            return [msgspec.json.encode(shown).decode()]
        if block.type == "text" or block.source is not None:
            raise BadRequest(field, f"must be a text block; {block.type!r} is not supported here")
        note(f"{field} is left out: the model is not shown blocks of the type {block.type!r}")
        return []

    def _document(self, block: Block, field: str) -> list[str | ImageSource]:
        """Raises BadRequest for a document that is no text."""
        source = _source(block, field)
        if source.type == "text":
            return [_required(source.data, f"{field}.source.data")]
        if source.type == "content":
            content = source.content or ""
            found = content if isinstance(content, str) else self._blocks(content, f"{field}.source.content")
            return [found] if isinstance(found, str) else list(found)
        raise BadRequest(f"{field}.source.type", f"must be 'text' or 'content'; {source.type!r} is not supported")

    def _blocks(self, blocks: Sequence[Block], field: str) -> Content:
        return content_of([item for at, block in enumerate(blocks) for item in self._items(block, f"{field}[{at}]")])

    def _change(self, block: Block, field: str) -> list[str | ImageSource]:
        """A tool that is offered, or no more, from here on."""
        tool = block.tool or {}
        name = str(tool.get("name") or tool.get("server_name") or "")
        if block.type == "tool_removal":
            return [f"The tool {name} cannot be called any more."]
        if tool.get("type") == "tool_definition":
            text = self.tools.define(tool.get("definition") or {}, f"{field}.tool.definition")
            return [text] if text else []
        return [self.tools.find(name)]


def _source(block: Block, field: str) -> Source:
    """Raises BadRequest."""
    if block.source is None:
        raise BadRequest(f"{field}.source", "is required")
    return converted(block.source, Source, f"{field}.source")


def _text(block: Block, field: str) -> str:
    if block.type != "text" or block.text is None:
        raise BadRequest(field, f"must be a text block; {block.type!r} is not supported here")
    return block.text


def _required(value: str | None, field: str) -> str:
    if value is None:
        raise BadRequest(field, "is required")
    return value
