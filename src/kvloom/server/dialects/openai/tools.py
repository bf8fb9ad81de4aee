"""Tools in OpenAI's bodies and answers."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvloom.contract.errors import BadRequest
from kvloom.server.chat.tools import Tool, ToolChoice, allowed, check_tools
from kvloom.server.dialects.ids import new_id

MAX_TOOLS = 128  # as OpenAI says of this API


class FunctionBody(msgspec.Struct, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(msgspec.Struct, kw_only=True):
    function: FunctionBody
    type: Literal["function"] = "function"


class FunctionName(msgspec.Struct):
    name: str


class AllowedTool(msgspec.Struct, kw_only=True):
    function: FunctionName
    type: Literal["function"] = "function"


class AllowedTools(msgspec.Struct, kw_only=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Meta(min_length=1)]


class NamedChoice(msgspec.Struct, kw_only=True):
    """One tool that is to be called, or those that alone may be, or one of which must be."""

    type: Literal["function", "allowed_tools"] = "function"
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


class CallFunction(msgspec.Struct, kw_only=True):
    """`arguments`: None = none."""

    name: str
    arguments: str | dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.arguments is None:
            self.arguments = "{}"


class CallBody(msgspec.Struct, kw_only=True):
    """A call that an earlier answer of the conversation made."""

    function: CallFunction
    id: str = ""
    type: Literal["function", ""] | None = "function"

    def __post_init__(self) -> None:
        self.type = "function"


def read_tools(
    tools: Sequence[ToolBody] | None, choice: Literal["none", "auto", "required"] | NamedChoice | None
) -> tuple[tuple[Tool, ...], ToolChoice]:
    """The tools that may be called, and whether they must be. Raises BadRequest naming the field."""
    if len(tools or ()) > MAX_TOOLS:
        raise BadRequest("tools", f"has {len(tools or ())} tools; there may be at most {MAX_TOOLS}")
    found = tuple(
        Tool(
            tool.function.name,
            tool.function.description or "",
            tool.function.parameters,
            bool(tool.function.strict),
            f"tools[{i}].function",
        )
        for i, tool in enumerate(tools or ())
    )
    if not isinstance(choice, NamedChoice):
        return found, check_tools(found, None if choice is None else ToolChoice(choice), "tool_choice")
    if choice.type == "function":
        if choice.function is None:
            raise BadRequest("tool_choice.function", "is required")
        return found, check_tools(found, ToolChoice("named", choice.function.name), "tool_choice")
    if choice.allowed_tools is None:
        raise BadRequest("tool_choice.allowed_tools", "is required")
    wanted = check_tools(found, ToolChoice(choice.allowed_tools.mode), "tool_choice")
    field = "tool_choice.allowed_tools.tools"
    names = [(tool.function.name, f"{field}[{i}].function.name") for i, tool in enumerate(choice.allowed_tools.tools)]
    return allowed(found, names), wanted


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class CallDelta(msgspec.Struct, omit_defaults=True):
    """Part of a call: id, type and name come once, with empty arguments; then pieces of the arguments."""

    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionDelta | None = None


def call_id() -> str:
    return f"call_{new_id()[:24]}"
