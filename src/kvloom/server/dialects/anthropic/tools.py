"""Tools of Anthropic's /v1/messages. One that Anthropic itself would run is left out, which a note tells.

A deferred tool is not among those that the prompt lists. Once a block of the conversation names it, it may be called,
and its definition stands there: so the prompt before that place remains as it was.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from kvloom.contract.errors import BadRequest
from kvloom.server.chat.tools import Tool
from kvloom.server.http.body import converted
from kvloom.server.serving.notes import note

_TEXT, _NUMBER, _FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
_LINES = {"type": "array", "items": _NUMBER}
_FILE: dict[str, Any] = {"path": _TEXT, "file_text": _TEXT, "old_str": _TEXT, "new_str": _TEXT, "insert_line": _NUMBER}
_FILE |= {"insert_text": _TEXT, "view_range": _LINES}
# those that the client runs, by their type without its date: a description, required fields, fields
_BUILT_IN: Mapping[str, tuple[str, Sequence[str], Mapping[str, Any]]] = {
    "bash": ("Run a command in the user's shell.", (), {"command": _TEXT, "restart": _FLAG}),
    "text_editor": (
        "View and edit the user's files. `command` is view, create, str_replace or insert.",
        ("command", "path"),
        {"command": _TEXT, **_FILE},
    ),
    "memory": (
        "View and change the files of your memory. `command` is view, create, str_replace, insert, delete or rename.",
        ("command",),
        {"command": _TEXT, **_FILE, "old_path": _TEXT, "new_path": _TEXT},
    ),
}
_SEARCH = "tool_search_tool"


class ToolBody(msgspec.Struct, kw_only=True):
    """One of any type."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None

    def tool(self, field: str) -> Tool | None:
        """None for a tool that is not run by the client. Raises BadRequest."""
        if self.type not in (None, "custom"):
            return self._built_in(field)
        if self.name is None:
            raise BadRequest(f"{field}.name", "is required")
        if (self.input_schema or {}).get("type", "object") != "object":
            raise BadRequest(f"{field}.input_schema.type", "must be 'object'")
        return Tool(self.name, self.description or "", self.input_schema, bool(self.strict), field, "input_schema")

    def _built_in(self, field: str) -> Tool | None:
        kind = (self.type or "").rpartition("_")[0]
        if kind not in _BUILT_IN:
            note(f"{field} is left out: {self.type!r} is no tool that this server, or its caller, runs")
            return None
        about, required, properties = _BUILT_IN[kind]
        schema = {"type": "object", "properties": dict(properties), "required": list(required)}
        return Tool(self.name or kind, about, schema, field=field)


@dataclass(slots=True)
class Tools:
    """The tools of a conversation, by name; `hidden` are those that nothing has named yet."""

    known: dict[str, Tool] = field(default_factory=dict)
    twice: list[Tool] = field(default_factory=list)  # of a name that is there already
    hidden: set[str] = field(default_factory=set)

    def visible(self) -> tuple[Tool, ...]:
        """Those that may be called."""
        return (*(tool for name, tool in self.known.items() if name not in self.hidden), *self.twice)

    def find(self, name: str) -> str:
        """A block names a tool: what the model is told."""
        if name not in self.hidden:
            return f"Tool: {name}"
        self.hidden.discard(name)
        self.known[name] = replace(self.known[name], is_listed=False)
        return _told(self.known[name])

    def define(self, given: Mapping[str, Any], field: str) -> str:
        """A block defines a tool: what the model is told. Raises BadRequest."""
        tool = converted(given, ToolBody, field).tool(field)
        if tool is None:
            return ""
        self.known[tool.name] = replace(tool, is_listed=False)
        return _told(tool)


def read_tools(bodies: Sequence[ToolBody]) -> Tools:
    """Raises BadRequest naming the field."""
    tools = Tools()
    is_searched_here = not any((body.type or "").startswith(_SEARCH) for body in bodies)
    for index, body in enumerate(bodies):
        tool = body.tool(f"tools[{index}]")
        if tool is None:
            continue
        if tool.name in tools.known:
            tools.twice.append(tool)
            continue
        tools.known[tool.name] = tool
        if body.defer_loading and is_searched_here:
            tools.hidden.add(tool.name)
    return tools


def _told(tool: Tool) -> str:
    return f"This tool can be called now:\n{json.dumps(tool.plain['function'], ensure_ascii=False)}"
