"""Tools in OpenAI's bodies and answers."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kvloom.contract.errors import BadRequest
from kvloom.server.chat.tools import Tool, ToolChoice, allowed, check_tools
from kvloom.server.dialects.ids import new_id
from kvloom.server.dialects.openai.custom import INPUT, custom_tool
from kvloom.server.serving.notes import note

MAX_TOOLS = 128  # as OpenAI says of this API


class FunctionBody(msgspec.Struct, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomBody(msgspec.Struct, kw_only=True):
    name: str
    description: str | None = None
    format: dict[str, Any] | None = None


class ToolBody(msgspec.Struct, kw_only=True):
    """One of any type."""

    type: str = "function"
    function: FunctionBody | None = None
    custom: CustomBody | None = None

    def tool(self, field: str) -> Tool | None:
        """None for a tool that is not run by the client. Raises BadRequest."""
        if self.type == "custom" and self.custom is not None:
            form = (self.custom.format or {}).get("grammar") or {}
            return custom_tool(self.custom.name, self.custom.description or "", form, f"{field}.custom")
        if self.type not in ("function", "custom"):
            note(f"{field} is left out: {self.type!r} is no tool that this server, or its caller, runs")
            return None
        one = self.function
        if one is None:
            raise BadRequest(f"{field}.{self.type}", "is required")
        return Tool(one.name, one.description or "", one.parameters, bool(one.strict), f"{field}.function")


class FunctionName(msgspec.Struct):
    name: str


class AllowedTool(msgspec.Struct, kw_only=True):
    """One of any type; those that are left out of the tools are none here."""

    type: str = "function"
    function: FunctionName | None = None
    custom: FunctionName | None = None


class AllowedTools(msgspec.Struct, kw_only=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Meta(min_length=1)]


class NamedChoice(msgspec.Struct, kw_only=True):
    """One tool that is to be called, or those that alone may be, or one of which must be."""

    type: Literal["function", "custom", "allowed_tools"] = "function"
    function: FunctionName | None = None
    custom: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


class CallFunction(msgspec.Struct, kw_only=True):
    """`arguments`: None = none."""

    name: str
    arguments: str | dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.arguments is None:
            self.arguments = "{}"


class CustomCall(msgspec.Struct, kw_only=True):
    name: str
    input: str = ""


class CallBody(msgspec.Struct, kw_only=True):
    """A call that an earlier answer made; one of a custom tool is a function's with one argument."""

    function: CallFunction | None = None
    id: str = ""
    type: str | None = "function"
    custom: CustomCall | UnsetType | None = UNSET

    def __post_init__(self) -> None:
        if self.function is None and isinstance(self.custom, CustomCall):
            self.function = CallFunction(name=self.custom.name, arguments={INPUT: self.custom.input})
        if self.function is None:
            raise ValueError("Object missing required field `function`")
        self.type, self.custom = "function", UNSET


def read_tools(
    tools: Sequence[ToolBody] | None, choice: Literal["none", "auto", "required"] | NamedChoice | None
) -> tuple[tuple[Tool, ...], ToolChoice]:
    """The tools that may be called, and whether they must be. Raises BadRequest naming the field."""
    if len(tools or ()) > MAX_TOOLS:
        raise BadRequest("tools", f"has {len(tools or ())} tools; there may be at most {MAX_TOOLS}")
    read = [tool.tool(f"tools[{index}]") for index, tool in enumerate(tools or ())]
    found = tuple(tool for tool in read if tool is not None)
    if not isinstance(choice, NamedChoice):
        return found, check_tools(found, None if choice is None else ToolChoice(choice), "tool_choice")
    if choice.type != "allowed_tools":
        named = choice.function if choice.type == "function" else choice.custom
        if named is None:
            raise BadRequest(f"tool_choice.{choice.type}", "is required")
        return found, check_tools(found, ToolChoice("named", named.name), "tool_choice")
    if choice.allowed_tools is None:
        raise BadRequest("tool_choice.allowed_tools", "is required")
    wanted = check_tools(found, ToolChoice(choice.allowed_tools.mode), "tool_choice")
    field = "tool_choice.allowed_tools.tools"
    named_tools = [(tool.function or tool.custom, tool.type, at) for at, tool in enumerate(choice.allowed_tools.tools)]
    names = [(one.name, f"{field}[{at}].{kind}.name") for one, kind, at in named_tools if one is not None]
    return allowed(found, names), wanted


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class CustomDelta(msgspec.Struct, omit_defaults=True):
    name: str | None = None
    input: str | None = None


class CallDelta(msgspec.Struct, omit_defaults=True):
    """Part of a call: id, type and name come once, with empty arguments; then pieces of the arguments."""

    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionDelta | None = None
    custom: CustomDelta | None = None


def call_id() -> str:
    return f"call_{new_id()[:24]}"
