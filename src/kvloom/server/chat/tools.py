"""The tools of a chat, and whether the model may or must call them. Independent of any protocol."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvloom.contract.errors import BadRequest

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}\Z")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function. `parameters`: JSON schema of its arguments. `field`: the caller's field, for errors.

    `is_strict`: arguments follow the schema even where the model is free to call. `is_listed`: it is in the
    prompt's list of tools; another one is described within the conversation.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    is_strict: bool = False
    field: str = "tools"
    schema_name: str = "parameters"  # the caller's field that holds the schema
    is_listed: bool = True
    is_custom: bool = False  # its only argument is answered as a text
    held: Mapping[str, Any] | None = None  # the schema that arguments follow, where the model is shown another one

    @property
    def schema_field(self) -> str:
        """The caller's field of the schema, for errors."""
        return f"{self.field}.{self.schema_name}"

    @property
    def schema(self) -> dict[str, Any]:
        """Schema of the arguments, always an object's; without parameters it allows none."""
        parameters = self.parameters if self.held is None else self.held
        if parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object", **parameters}

    @property
    def plain(self) -> dict[str, Any]:
        """As chat templates take it."""
        parameters = {"type": "object", "properties": {}} if self.parameters is None else dict(self.parameters)
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """none: no calls. auto: the model decides. required: at least one call. named: exactly one call, of `name`."""

    mode: Literal["none", "auto", "required", "named"] = "auto"
    name: str = ""


def check_tools(tools: Sequence[Tool], choice: ToolChoice | None, choice_field: str) -> ToolChoice:
    """The choice; auto when none is given and there are tools. Raises BadRequest that names the field."""
    names: set[str] = set()
    for tool in tools:
        if not _NAME.match(tool.name):
            raise BadRequest(
                f"{tool.field}.name", f"must be 1 to 128 letters, digits, '_', '.' or '-', got {tool.name[:80]!r}"
            )
        if tool.name in names:
            raise BadRequest(f"{tool.field}.name", f"{tool.name!r} is there twice")
        names.add(tool.name)
        if (tool.parameters or {}).get("type", "object") != "object":
            raise BadRequest(f"{tool.schema_field}.type", "must be 'object'")
    if choice is None:
        return ToolChoice("auto" if tools else "none")
    if not tools and choice.mode == "auto":
        return ToolChoice("none")
    if not tools and choice.mode != "none":
        raise BadRequest(choice_field, "needs tools")
    if choice.mode == "named" and choice.name not in names:
        raise BadRequest(choice_field, f"names {choice.name!r}, which is none of the tools")
    return choice


def allowed(tools: Sequence[Tool], names: Sequence[tuple[str, str]]) -> tuple[Tool, ...]:
    """Those of the tools that are named. `names`: the name and its field. Raises BadRequest for another one."""
    known = {tool.name for tool in tools}
    for name, field in names:
        if name not in known:
            raise BadRequest(field, f"{name!r} is none of the tools")
    wanted = {name for name, _ in names}
    return tuple(tool for tool in tools if tool.name in wanted)


def with_parsed(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with the arguments of each call as `parsed` too, so that a special token's text is seen there which
    JSON escapes hide in the text of the arguments.
    """
    found = list[Mapping[str, Any]]()
    for message in messages:
        if message.get("tool_calls"):
            functions = [call["function"] for call in message["tool_calls"]]
            known = [{**each, "parsed": parsed_arguments(each["arguments"])} for each in functions]
            both = zip(message["tool_calls"], known, strict=True)
            message = {**message, "tool_calls": [{**call, "function": function} for call, function in both]}
        found.append(message)
    return found


def parsed_arguments(arguments: Any) -> Any:
    """Arguments of an earlier call in the form of templates: an object, or unchanged if they are not one."""
    if not arguments:
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
