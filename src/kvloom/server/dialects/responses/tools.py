"""Tools of OpenAI's /v1/responses: what each is to the model, and how a call of it is answered.

A tool that OpenAI itself would run is left out, which a note tells. One that the client runs is shown as a function.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvloom.contract.errors import BadRequest
from kvloom.server.chat.tools import Tool, ToolChoice, allowed, check_tools
from kvloom.server.dialects.openai.custom import INPUT, custom_tool
from kvloom.server.http.body import converted
from kvloom.server.serving.notes import note

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """How calls of a tool are answered. `holds`: the item's field with what the model gave; `given`: what else is in
    it.
    """

    item: str
    id: str  # what the item's id begins with
    holds: str
    description: str = ""
    parameters: Json | None = None
    given: Mapping[str, Any] = field(default_factory=dict)


def _object(required: Sequence[str], **properties: Any) -> Json:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


_TEXT, _TEXTS, _NUMBER = {"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "integer"}
FUNCTION, CUSTOM = "function", "custom"
BUILT_IN: Mapping[str, Kind] = {  # by the type of the tool
    "local_shell": Kind(
        *("local_shell_call", "lsh", "action", "Run a command on the user's machine."),
        _object(["command"], command=_TEXTS, working_directory=_TEXT, timeout_ms=_NUMBER),
        {"type": "exec", "env": {}},
    ),
    "shell": Kind(
        *("shell_call", "sh", "action", "Run shell commands on the user's machine."),
        _object(["commands"], commands=_TEXTS, timeout_ms=_NUMBER, max_output_length=_NUMBER),
    ),
    "apply_patch": Kind(
        *("apply_patch_call", "apc", "operation", "Create, change or delete a file by a diff in V4A form."),
        _object(
            ["type", "path"],
            type={"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
            path=_TEXT,
            diff=_TEXT,
        ),
    ),
    "tool_search": Kind("tool_search_call", "tsc", "arguments"),
}
_KINDS: Mapping[str, Kind] = {
    FUNCTION: Kind("function_call", "fc", "arguments"),
    CUSTOM: Kind("custom_tool_call", "ctc", INPUT),
    **BUILT_IN,
}


@dataclass(frozen=True, slots=True)
class Offered:
    """A tool as the caller knows it."""

    type: str
    name: str
    namespace: str | None = None

    @property
    def kind(self) -> Kind:
        return _KINDS[self.type]


class ToolBody(msgspec.Struct, kw_only=True):
    """One of any type; each type has some of the fields."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None
    format: Json | None = None  # of a custom tool's input
    tools: list[Json] | None = None  # of a namespace
    defer_loading: bool | None = None
    execution: str | None = None  # of a tool_search: "client" or "server"
    environment: Json | None = None  # of a shell


class NamedChoice(msgspec.Struct, kw_only=True):
    """A tool that is to be called; or of the tools those that alone may be, or must be."""

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[Json], Meta(min_length=1)] | None = None  # of allowed_tools


Choice = Literal["none", "auto", "required"] | NamedChoice


@dataclass(slots=True)
class Tools:
    """The tools of a response. `offered`: by the name that the model knows; `deferred`: those that a search finds."""

    shown: list[Tool] = field(default_factory=list)
    offered: dict[str, Offered] = field(default_factory=dict)
    deferred: set[str] = field(default_factory=set)
    is_searched: bool = False  # the client finds deferred tools

    def put(self, given: Sequence[Json], field: str, namespace: str | None = None, is_found: bool = False) -> None:
        """`is_found`: by a search, so none is deferred. Raises BadRequest naming the field."""
        for index, each in enumerate(given):
            at = f"{field}[{index}]"
            body = converted(each, ToolBody, at)
            if body.type == "namespace" and namespace is None:
                self.put(body.tools or [], f"{at}.tools", _required(body.name, f"{at}.name"), is_found)
            elif (found := _read(body, at, namespace)) is None:
                note(f"{at} is left out: {body.type!r} is no tool that this server, or its caller, runs")
            else:
                self._put(body, *found, is_found)

    def _put(self, body: ToolBody, tool: Tool, offered: Offered, is_found: bool) -> None:
        if is_found and tool.name in self.offered and tool.name not in self.deferred:
            return
        if is_found:
            self.shown = [each for each in self.shown if each.name != tool.name]
            self.deferred.discard(tool.name)
            tool = replace(tool, is_listed=False)
        elif body.defer_loading:
            self.deferred.add(tool.name)
        self.shown.append(tool)
        self.offered[tool.name] = offered
        self.is_searched = self.is_searched or body.type == "tool_search"

    def visible(self) -> tuple[Tool, ...]:
        """Tools that the model is shown."""
        hidden = self.deferred if self.is_searched else set()
        return tuple(tool for tool in self.shown if tool.name not in hidden)

    def chosen(self, choice: Choice | None) -> tuple[tuple[Tool, ...], ToolChoice]:
        """Tools that may be called, and whether they must be. Raises BadRequest naming the field."""
        tools = self.visible()
        if not isinstance(choice, NamedChoice):
            wanted = ToolChoice(choice) if choice is not None and (tools or choice == "required") else None
            return tools, check_tools(tools, wanted, "tool_choice")
        if choice.type != "allowed_tools":
            return tools, check_tools(tools, ToolChoice("named", _name_of(choice, "tool_choice")), "tool_choice")
        wanted = check_tools(tools, ToolChoice(choice.mode or "auto"), "tool_choice")
        named = []
        for index, each in enumerate(choice.tools or ()):
            at = f"tool_choice.tools[{index}]"
            one = converted(each, NamedChoice, at)
            if one.type in _KINDS:
                named.append((_name_of(one, at), f"{at}.name"))
        return allowed(tools, named), wanted

    def called(self, name: str) -> Offered:
        """The tool that the model calls by a name; models may leave out the namespace."""
        if name in self.offered:
            return self.offered[name]
        bare = [each for each in self.offered.values() if each.name == name]
        return bare[0] if len(bare) == 1 else Offered(FUNCTION, name)


def told(given: Sequence[Json], field: str) -> str:
    """Tools that a search has found, as the model is told of them. Raises BadRequest naming the field."""
    tools = Tools()
    tools.put(given, field)
    lines = [json.dumps(tool.plain["function"], ensure_ascii=False) for tool in tools.shown]
    return "\n".join(["These tools can be called now:", *lines])


def shown_name(name: str, namespace: str | None) -> str:
    """What the model knows a tool as."""
    return f"{namespace}__{name}" if namespace else name


def _read(body: ToolBody, field: str, namespace: str | None) -> tuple[Tool, Offered] | None:
    """None for a tool that is not run by the client."""
    name, about = shown_name(body.name, namespace), body.description or ""
    if body.type == FUNCTION:
        tool = Tool(name, about, body.parameters, bool(body.strict), field)
        return tool, Offered(FUNCTION, body.name, namespace)
    if body.type == CUSTOM:
        return custom_tool(name, about, body.format or {}, field), Offered(CUSTOM, body.name, namespace)
    kind = BUILT_IN.get(body.type)
    is_elsewhere = body.execution == "server" or (body.type == "tool_search" and body.execution is None)
    if kind is None or is_elsewhere or (body.environment or {}).get("type", "local") != "local":
        return None
    parameters = kind.parameters or body.parameters
    return Tool(body.type, about or kind.description, parameters, field=field), Offered(body.type, body.type)


def _name_of(choice: NamedChoice, field: str) -> str:
    """Raises BadRequest."""
    if choice.type in BUILT_IN:
        return choice.type
    if choice.type not in (FUNCTION, CUSTOM):
        raise BadRequest(f"{field}.type", f"{choice.type!r} is no tool that this server, or its caller, runs")
    return shown_name(_required(choice.name, f"{field}.name"), choice.namespace)


def _required(value: str | None, field: str) -> str:
    if not value:
        raise BadRequest(field, "is required")
    return value
