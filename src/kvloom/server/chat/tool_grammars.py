"""Grammars that make an answer call tools, in the form that tool_calls.py reads. Lark, as llguidance takes it."""

import json
from collections.abc import Sequence
from typing import Any

from kvloom.server.chat.grammars import checked_grammar, inner_schema
from kvloom.server.chat.regexes import lark_regex
from kvloom.server.chat.tool_calls import CLOSE, OPEN, ToolForm
from kvloom.server.chat.tools import Tool, ToolChoice

_SEPARATORS: dict[ToolForm, str] = {"hermes": "\n", "qwen3_coder": "\n", "llama3": "; "}
_MARKS: dict[ToolForm, str] = {"hermes": OPEN, "qwen3_coder": OPEN, "llama3": ""}


def tool_grammar(form: ToolForm, tools: Sequence[Tool], choice: ToolChoice, is_parallel: bool, answer: str) -> str:
    """The grammar of an answer; "" = unrestricted. `answer`: grammar of an answer without calls, "" = unrestricted;
    there is none where calls are required.

    Raises BadRequest that names the tool whose schema cannot be used.
    """
    if choice.mode == "none" or not tools:
        return answer
    if choice.mode == "auto" and not answer and not any(tool.is_strict for tool in tools):
        return ""
    if choice.mode == "named":
        tools, is_parallel = [tool for tool in tools if tool.name == choice.name], False
    is_free = choice.mode == "auto" and not answer
    lines = []
    for index, tool in enumerate(tools):
        schema = tool.schema if tool.is_strict or choice.mode != "auto" else {"type": "object"}
        lines += _call_rules(form, index, tool, schema)
    lines.append("body: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    lines.append(f"call: {_literal(_MARKS[form])} body")
    if is_free:
        lines += _free_rules(form, is_parallel)
        return _checked({"lark_grammar": "\n".join(lines)})
    more = f" ({_literal(_SEPARATORS[form])} call)*" if is_parallel else ""
    lines.append(f"calls: call{more}")
    if not answer or choice.mode != "auto":
        return _checked({"lark_grammar": "\n".join([*lines, "start: calls"])})
    other = _grammars_of(answer)
    lines.append("start: calls | @answer")
    return _checked({"lark_grammar": "\n".join(lines)}, {**other[0], "name": "answer"}, *other[1:])


def _free_rules(form: ToolForm, is_parallel: bool) -> list[str]:
    """Free text in which every call follows its schema. The mark of a call is a lexeme that ends as early as
    possible.
    """
    count = "*" if is_parallel else "?"
    if form == "llama3":  # the whole answer is a call
        more = f" ({_literal(_SEPARATORS[form])} call){count}" if is_parallel else ""
        return [f"start: call{more} | TEXT?", r"TEXT: /[^{](.|\n)*/"]
    return [
        f"start: free{count} TEXT",
        "free: mark body",
        f"mark[lazy]: TEXT {_literal(OPEN)}",
        r"TEXT: /(.|\n)*/",
    ]


def _call_rules(form: ToolForm, index: int, tool: Tool, schema: dict[str, Any]) -> list[str]:
    """What follows a call's mark."""
    rule = f"call_{index}"
    if form == "qwen3_coder":
        return _xml_rules(rule, tool, schema)
    key = "parameters" if form == "llama3" else "arguments"
    begin = f'{{"name": {json.dumps(tool.name)}, "{key}": '
    end = "}"
    if form == "hermes":
        begin, end = f"\n{begin}", f"{end}\n{CLOSE}"
    return [f"{rule}: {_literal(begin)} {_json(schema, tool)} {_literal(end)}"]


def _xml_rules(rule: str, tool: Tool, schema: dict[str, Any]) -> list[str]:
    """Parameters one after the other in the schema's order; optional ones may be omitted."""
    lines = []
    parts = []
    required = schema.get("required") or ()
    shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    for index, (key, value) in enumerate((schema.get("properties") or {}).items()):
        name = f"{rule}_{index}"
        begin, end = f"<parameter={key}>\n", "\n</parameter>\n"
        if not isinstance(value, dict) or value.get("type") != "string":
            lines.append(f"{name}: {_literal(begin)} {_json(_with(value, shared), tool)} {_literal(end)}")
        elif "enum" in value or "const" in value:
            options = " | ".join(_literal(str(text)) for text in value.get("enum", [value.get("const")]))
            lines.append(f"{name}: {_literal(begin)} ({options}) {_literal(end)}")
        else:
            lines += [f"{name}: {_literal(begin)} {name}_text", f"{name}_text[suffix={_literal(end)}]: {_text(value)}"]
        parts.append(name if key in required else f"{name}?")
    begin, end = f"\n<function={tool.name}>\n", f"</function>\n{CLOSE}"
    return [*lines, f"{rule}: {_literal(begin)} {' '.join(parts)} {_literal(end)}"]


def _text(schema: dict[str, Any]) -> str:
    """A regular expression for a string that is written without quotes."""
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        before = "" if pattern.startswith("^") else r"(.|\n)*"
        after = "" if pattern.endswith("$") else r"(.|\n)*"
        return lark_regex(f"{before}({pattern.removeprefix('^').removesuffix('$')}){after}")
    low, high = schema.get("minLength", 0), schema.get("maxLength", "")
    return rf"/(.|\n){{{low},{high}}}/"


def _with(schema: Any, shared: dict[str, Any]) -> Any:
    return {**shared, **schema} if isinstance(schema, dict) else schema


def _json(schema: Any, tool: Tool) -> str:
    """Raises BadRequest."""
    return "%json " + json.dumps(inner_schema(schema, tool.schema_field))


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _grammars_of(grammar: str) -> list[dict[str, Any]]:
    """A grammar in its general form: a list whose first entry is the start."""
    text = grammar.lstrip()
    if text.startswith("{"):
        found: list[dict[str, Any]] = json.loads(text)["grammars"]
        return found
    return [{"lark_grammar": grammar}]


def _checked(*grammars: dict[str, Any]) -> str:
    return checked_grammar(json.dumps({"grammars": list(grammars)}), "tools")
