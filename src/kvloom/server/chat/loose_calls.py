"""Calls where no grammar writes any, as in fenced blocks: the arguments of strict tools are checked instead."""

import json
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from kvloom.server.chat.elements import item_schema, member_schema, options_of
from kvloom.server.chat.grammars import is_answer_of, json_grammar
from kvloom.server.chat.json_calls import Check
from kvloom.server.chat.tools import Tool


def checks_of(tools: Iterable[Tool]) -> dict[str, Check | None]:
    """By tool, what its arguments must pass as a whole to make a call; None = nothing."""
    return {tool.name: partial(_follow, tool) if tool.is_strict else None for tool in tools}


def _follow(tool: Tool, arguments: str) -> bool:
    """Whether arguments follow the schema of a strict tool as the grammar of its calls holds it, in any order."""
    schema = tool.schema
    try:
        text = json.dumps(_ordered(json.loads(arguments), schema, schema), ensure_ascii=False, allow_nan=False)
        return is_answer_of(json_grammar(schema, tool.schema_field, is_strict=True), text)
    except (ValueError, RecursionError):
        return False


def _ordered(value: Any, schema: object, root: Mapping[str, Any]) -> Any:
    """The value with members of objects in the order of the schema. `root` holds what references lead to."""
    if isinstance(value, list):
        items = item_schema(schema, root)
        return [_ordered(each, items, root) for each in value]
    if not isinstance(value, dict):
        return value
    known = [key for option in options_of(schema, root) for key in option.get("properties") or () if key in value]
    keys = dict.fromkeys([*known, *value])
    return {key: _ordered(value[key], member_schema(schema, root, key), root) for key in keys}
