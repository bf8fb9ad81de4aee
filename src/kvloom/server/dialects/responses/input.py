"""The input of OpenAI's /v1/responses: items, which become the messages of a chat."""

from collections.abc import Sequence

import msgspec

from kvloom.contract.errors import BadRequest
from kvloom.server.chat.content import Content, content_of, text_of
from kvloom.server.dialects.openai.messages import Part, Said
from kvloom.server.dialects.openai.tools import CallBody, CallFunction
from kvloom.server.serving.vision.sources import ImageSource

REFERENCE = "item_reference"
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text")


class InputItem(msgspec.Struct, kw_only=True):
    """A message, something that an earlier response put out, or the result of a call."""

    type: str | None = None
    id: str | None = None  # of an item_reference
    role: str | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None


def messages_of(items: Sequence[InputItem], field: str = "input", num_past: int = 0) -> list[Said]:
    """Of items, the first `num_past` of which the caller did not give now: errors count from there.

    Calls and reasoning join the assistant's message that they belong to. Raises BadRequest naming the field.
    """
    messages: list[Said] = []
    names: dict[str, str] = {}  # of the tools that were called, by the id of the call
    reasoning: str | None = None
    for index, item in enumerate(items):
        at = f"{field}[{index - num_past}]"
        if item.type == "reasoning":
            reasoning = text_of(_content_of(item.content, f"{at}.content")) or None
            continue
        message = _message_of(item, at, names)
        if message.role == "assistant":
            message.reasoning, reasoning = reasoning, None
            last = messages[-1] if messages else None
            if message.tool_calls and last is not None and last.role == "assistant":
                last.tool_calls = [*(last.tool_calls or ()), *message.tool_calls]
                continue
        messages.append(message)
    return messages


def references_of(given: str | Sequence[InputItem], field: str = "input") -> tuple[tuple[str, str], ...]:
    """The field and id of each item that is only named. Raises BadRequest."""
    if isinstance(given, str):
        return ()
    named = [(f"{field}[{index}].id", item.id) for index, item in enumerate(given) if item.type == REFERENCE]
    return tuple((at, _required(id, at)) for at, id in named)


def _message_of(item: InputItem, field: str, names: dict[str, str]) -> Said:
    if item.type == "function_call":
        id, name = _required(item.call_id, f"{field}.call_id"), _required(item.name, f"{field}.name")
        names[id] = name
        call = CallBody(function=CallFunction(name=name, arguments=item.arguments or "{}"), id=id)
        return Said(role="assistant", content="", tool_calls=[call])
    if item.type == "function_call_output":
        id = _required(item.call_id, f"{field}.call_id")
        content = _content_of(item.output, f"{field}.output")
        return Said(role="tool", content=content, name=names.get(id), tool_call_id=id)
    if item.type not in (None, "message"):
        raise BadRequest(f"{field}.type", f"{item.type!r} is not supported")
    role = _required(item.role, f"{field}.role")
    content = _content_of(item.content, f"{field}.content")
    return Said(role=role, content=content)


def _required(value: str | None, field: str) -> str:
    if value is None:
        raise BadRequest(field, "is required")
    return value


def _content_of(content: str | list[Part] | None, field: str) -> Content:
    """Raises BadRequest."""
    if content is None or isinstance(content, str):
        return content or ""
    found: list[str | ImageSource] = []
    for index, part in enumerate(content):
        if part.type == "input_image":
            found.append(_image(part, f"{field}[{index}]"))
            continue
        text = part.refusal if part.type == "refusal" else part.text if part.type in _TEXT_PARTS else None
        if text is None:
            problem = f"must be a text part or an input_image; {part.type!r} is not supported"
            raise BadRequest(f"{field}[{index}]", problem)
        found.append(text)
    return content_of(found)


def _image(part: Part, field: str) -> ImageSource:
    if part.file_id is not None:
        raise BadRequest(f"{field}.file_id", "is not supported: no files are kept; give image_url")
    return part.source(field)
