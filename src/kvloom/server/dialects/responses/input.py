"""The input of OpenAI's /v1/responses: items, which become the messages of a chat."""

from collections.abc import Sequence
from typing import Any

import msgspec

from kvloom.contract.errors import BadRequest
from kvloom.server.chat.content import Content, content_of, text_of
from kvloom.server.dialects.openai.custom import INPUT
from kvloom.server.dialects.openai.messages import Part, Said
from kvloom.server.dialects.openai.tools import CallBody, CallFunction
from kvloom.server.dialects.responses.tools import BUILT_IN, shown_name, told
from kvloom.server.http.body import converted
from kvloom.server.serving.notes import note
from kvloom.server.serving.vision.sources import ImageSource

REFERENCE = "item_reference"
FOUND = ("tool_search_output", "additional_tools")  # items with tools that a search has found
_ALONE = ("mcp_call", "tool_search_call")  # calls that may have no id but their own
_OPAQUE = {
    REFERENCE: "nothing is looked up here; give the item itself",
    **dict.fromkeys(
        ("compaction", "context_compaction", "compaction_summary"), "it is encrypted, for the server that made it"
    ),
}
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text")


class InputItem(msgspec.Struct, kw_only=True):
    """A message, something that an earlier response put out, or the result of a call. Each type has some of the
    fields, and types that are not known here may be among them.
    """

    type: str | None = None
    id: str | None = None  # of an item_reference
    role: str | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    server_label: str | None = None  # of an mcp_call: the namespace of its tool
    arguments: str | dict[str, Any] | None = None
    input: str | None = None  # of a custom_tool_call
    action: dict[str, Any] | None = None  # of a shell's call
    operation: dict[str, Any] | None = None  # of an apply_patch_call
    tools: list[dict[str, Any]] | None = None  # which a search has found
    output: Any = None
    error: Any = None


def messages_of(items: Sequence[InputItem], field: str = "input", num_past: int = 0) -> list[Said]:
    """Of items, the first `num_past` of which the caller did not give now: errors count from there.

    Calls and reasoning join the assistant's message that they belong to. An item of another type is left out, which a
    note tells. Raises BadRequest naming the field.
    """
    messages: list[Said] = []
    names: dict[str, str] = {}  # of the tools that were called, by the id of the call
    reasoning: str | None = None
    for index, item in enumerate(items):
        at = f"{field}[{index - num_past}]"
        if item.type == "reasoning":
            reasoning = text_of(_content_of(item.content, f"{at}.content")) or None
            continue
        for message in _messages_of(item, at, names):
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


def _messages_of(item: InputItem, field: str, names: dict[str, str]) -> list[Said]:
    """`names`: of the tools that were called, by the id of the call; those of this item are added."""
    kind = item.type or "message"
    if kind in _OPAQUE:
        raise BadRequest(f"{field}.type", f"{kind!r} is not supported: {_OPAQUE[kind]}")
    if kind == "additional_tools":
        return [Said(role="developer", content=told(item.tools or [], f"{field}.tools"))]
    if kind.endswith("_output"):
        id = item.call_id if kind in FOUND else _required(item.call_id, f"{field}.call_id")
        content = _result_of(item, f"{field}.output")
        return [Said(role="tool", content=content, name=names.get(id or ""), tool_call_id=id)]
    if (called := _called(item, field)) is not None:
        name, arguments = called
        id = item.call_id or (item.id or "" if kind in _ALONE else _required(None, f"{field}.call_id"))
        names[id] = name
        call = CallBody(function=CallFunction(name=name, arguments=arguments), id=id)
        messages = [Said(role="assistant", content="", tool_calls=[call])]
        if kind == "mcp_call":
            messages.append(Said(role="tool", content=_result_of(item, field), name=name, tool_call_id=id))
        return messages
    if kind != "message" and item.role is None:
        note(f"{field} is left out: the model is not shown items of the type {kind!r}")
        return []
    return [Said(role=_required(item.role, f"{field}.role"), content=_content_of(item.content, f"{field}.content"))]


def _called(item: InputItem, field: str) -> tuple[str, Any] | None:
    """The tool that an item calls, as the model knows it, and the arguments; None for an item that is no call."""
    match item.type:
        case "local_shell_call" | "shell_call" | "apply_patch_call":
            name = item.type.removesuffix("_call")
            given = (item.operation if name == "apply_patch" else item.action) or {}
            known = (BUILT_IN[name].parameters or {})["properties"]
            return name, {key: value for key, value in given.items() if key in known and value is not None}
        case "tool_search_call":
            return "tool_search", item.arguments or {}
        case "custom_tool_call":
            return shown_name(_required(item.name, f"{field}.name"), item.namespace), {INPUT: item.input or ""}
        case "function_call" | "mcp_call":
            name = _required(item.name, f"{field}.name")
            return shown_name(name, item.namespace or item.server_label), item.arguments or "{}"
    is_call = item.call_id is not None and item.name is not None
    return (item.name or "", item.arguments or {INPUT: item.input or ""}) if is_call else None


def _result_of(item: InputItem, field: str) -> Content:
    """What a call has returned: a text, parts, or whatever its tool returns, as JSON text. Raises BadRequest."""
    if item.type in FOUND:
        return told(item.tools or [], field)
    value = item.output if item.error is None else item.error
    if isinstance(value, list) and all(isinstance(each, dict) and "type" in each for each in value):
        return _content_of(converted(value, list[Part], field), field)
    if value is None or isinstance(value, str):
        return value or ""
    return msgspec.json.encode(value).decode()


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
