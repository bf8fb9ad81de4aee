"""Tools in OpenAI's bodies and answers."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from kvloom.server.chat.tools import Tool, ToolChoice, check_tools
from kvloom.server.dialects.ids import new_id


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


class NamedChoice(msgspec.Struct, kw_only=True):
    function: FunctionName
    type: Literal["function"] = "function"


class CallFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: str | dict[str, Any]


class CallBody(msgspec.Struct, kw_only=True):
    """A call that an earlier answer of the conversation made."""

    function: CallFunction
    id: str = ""
    type: Literal["function"] = "function"


def read_tools(
    tools: Sequence[ToolBody] | None, choice: Literal["none", "auto", "required"] | NamedChoice | None
) -> tuple[tuple[Tool, ...], ToolChoice]:
    """Raises BadRequest naming the field."""
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
    wanted = None
    if isinstance(choice, NamedChoice):
        wanted = ToolChoice("named", choice.function.name)
    elif choice is not None:
        wanted = ToolChoice(choice)
    return found, check_tools(found, wanted, "tool_choice")


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
