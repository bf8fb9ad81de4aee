"""The conversation of Anthropic's /v1/messages: turns of blocks, which become the messages of a chat."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from kvloom.contract.errors import BadRequest
from kvloom.server.chat.content import Content, content_of, joined
from kvloom.server.dialects.openai.messages import Said
from kvloom.server.dialects.openai.tools import CallBody, CallFunction
from kvloom.server.serving.vision.sources import ImageSource, checked_type, source_of_base64, source_of_url


class Source(msgspec.Struct, kw_only=True):
    """Where an image is."""

    type: str
    media_type: str | None = None  # these two of type base64
    data: str | None = None
    url: str | None = None

    def source(self, field: str) -> ImageSource:
        """Raises BadRequest."""
        if self.type == "base64":
            media_type = checked_type(_required(self.media_type, f"{field}.media_type"), f"{field}.media_type")
            return source_of_base64(_required(self.data, f"{field}.data"), media_type, f"{field}.data")
        if self.type == "url":
            return source_of_url(_required(self.url, f"{field}.url"), f"{field}.url")
        raise BadRequest(f"{field}.type", f"must be 'base64' or 'url'; {self.type!r} is not supported")


class Block(msgspec.Struct, kw_only=True):
    """A part of a turn. `cache_control` has no effect: every prefix is cached."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None  # of a tool_use
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None  # of a tool_result
    content: "str | list[Block] | None" = None
    is_error: bool | None = None
    source: Source | None = None  # of an image


class Turn(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


def messages_of(turns: Sequence[Turn]) -> list[Said]:
    """Results of tools are messages of their own, before the text of their turn. Raises BadRequest naming the field."""
    messages: list[Said] = []
    names: dict[str, str] = {}  # of the tools that were called, by the id of the call
    for index, turn in enumerate(turns):
        field = f"messages[{index}].content"
        if isinstance(turn.content, str):
            messages.append(Said(role=turn.role, content=turn.content))
        elif turn.role == "assistant":
            messages.append(_answer_of(turn.content, field, names))
        else:
            messages += _question_of(turn, turn.content, field, names)
    return messages


def text_of(content: str | list[Block], field: str) -> str:
    """Raises BadRequest for content that is not text."""
    if isinstance(content, str):
        return content
    return "\n".join(_text(block, f"{field}[{index}]") for index, block in enumerate(content))


def _answer_of(blocks: list[Block], field: str, names: dict[str, str]) -> Said:
    message = Said(role="assistant")
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(blocks):
        at = f"{field}[{index}]"
        if block.type == "tool_use":
            id, name = _required(block.id, f"{at}.id"), _required(block.name, f"{at}.name")
            names[id] = name
            calls.append(CallBody(function=CallFunction(name=name, arguments=block.input or {}), id=id))
        elif block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type != "redacted_thinking":  # encrypted, so that only Anthropic could read it
            texts.append(_text(block, at))
    message.content = "\n".join(texts)
    message.reasoning = "\n".join(thoughts) or None
    message.tool_calls = calls or None
    return message


def _question_of(turn: Turn, blocks: list[Block], field: str, names: dict[str, str]) -> list[Said]:
    """A user's turn as messages. A failed tool's result says so in its text, because templates have no other way."""
    messages, items = [], list[str | ImageSource]()
    for index, block in enumerate(blocks):
        at = f"{field}[{index}]"
        if block.type == "tool_result":
            id = _required(block.tool_use_id, f"{at}.tool_use_id")
            content = _content(block.content or "", f"{at}.content")
            content = joined("Error: ", content) if block.is_error else content
            messages.append(Said(role="tool", content=content, name=names.get(id), tool_call_id=id))
        else:
            items.append(_item(block, at))
    if items or not messages:
        messages.append(Said(role=turn.role, content=content_of(items)))
    return messages


def _content(content: str | list[Block], field: str) -> Content:
    if isinstance(content, str):
        return content
    return content_of([_item(block, f"{field}[{index}]") for index, block in enumerate(content)])


def _item(block: Block, field: str) -> str | ImageSource:
    if block.type != "image":
        return _text(block, field)
    if block.source is None:
        raise BadRequest(f"{field}.source", "is required")
    return block.source.source(f"{field}.source")


def _text(block: Block, field: str) -> str:
    if block.type != "text" or block.text is None:
        raise BadRequest(field, f"must be a text block; {block.type!r} is not supported here")
    return block.text


def _required(value: str | None, field: str) -> str:
    if value is None:
        raise BadRequest(field, "is required")
    return value
