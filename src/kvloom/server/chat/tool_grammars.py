"""Grammars that make answers call tools, in the form that the model's template shows: Lark, as llguidance takes it."""

import json
import re
from collections.abc import Sequence
from typing import Any

from kvloom.server.chat.form import ID, CallForm
from kvloom.server.chat.grammars import checked_grammar, inner_schema
from kvloom.server.chat.regexes import lark_regex
from kvloom.server.chat.tools import Tool, ToolChoice


def tool_grammar(form: CallForm, tools: Sequence[Tool], choice: ToolChoice, is_parallel: bool, answer: str) -> str:
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
    if is_free:
        lines += _free_rules(form, is_parallel)
        return _checked({"lark_grammar": "\n".join(lines)})
    begin, end = _literal(form.begin), _literal(form.end)
    lines.append("call: body" if form.is_section else f"call: {begin} body {end}")
    more = f" ({_literal(form.between)} call)*" if is_parallel else ""
    lines.append(f"calls: {begin} call{more} {end}" if form.is_section else f"calls: call{more}")
    if not answer or choice.mode != "auto":
        return _checked({"lark_grammar": "\n".join([*lines, "start: calls"])})
    other = _grammars_of(answer)
    lines.append("start: calls | @answer")
    return _checked({"lark_grammar": "\n".join(lines)}, {**other[0], "name": "answer"}, *other[1:])


def _free_rules(form: CallForm, is_parallel: bool) -> list[str]:
    """Free text in which every call follows its schema. The mark of a call is a lexeme that ends as early as
    possible.
    """
    between, end = _literal(form.between), _literal(form.end)
    if not form.begin:  # the whole answer is a call
        more = f" ({between} body)*" if is_parallel else ""
        return [f"start: body{more} | TEXT?", r"TEXT: /[^{](.|\n)*/"]
    more = f" ({between} body)*" if is_parallel and form.is_section else ""
    return [
        f"start: free{'*' if is_parallel and not form.is_section else '?'} TEXT",
        f"free: mark body{more} {end}",
        f"mark[lazy]: TEXT {_literal(form.begin)}",
        r"TEXT: /(.|\n)*/",
    ]


def _call_rules(form: CallForm, index: int, tool: Tool, schema: dict[str, Any]) -> list[str]:
    """A call, without the marks that may stand around several."""
    rule = f"call_{index}"
    if form.kind == "tagged":
        return _tagged_rules(form, rule, tool, schema)
    if form.kind == "python":
        return _python_rules(form, rule, tool, schema)
    return [f"{rule}: {_parts(form.head, tool.name, form.mid)} {_json(schema, tool)} {_parts(form.tail)}"]


def _parts(*texts: str) -> str:
    """Literals one after the other; an id is any word."""
    found = [piece for piece in re.split(f"({ID})", "".join(texts)) if piece]
    return " ".join("/[A-Za-z0-9_.-]+/" if piece == ID else _literal(piece) for piece in found) or '""'


def _tagged_rules(form: CallForm, rule: str, tool: Tool, schema: dict[str, Any]) -> list[str]:
    """Arguments one after the other in the schema's order; optional ones may be omitted."""
    lines = []
    parts = []
    required = schema.get("required") or ()
    shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    for index, (key, value) in enumerate((schema.get("properties") or {}).items()):
        name = f"{rule}_{index}"
        begin, end = f"{form.key_begin}{key}{form.key_end}", form.value_end
        if not isinstance(value, dict) or value.get("type") != "string":
            begin = f"{form.key_begin}{key}{form.other_end or form.key_end}"
            lines.append(f"{name}: {_literal(begin)} {_json(_with(value, shared), tool)} {_literal(end)}")
        elif "enum" in value or "const" in value:
            options = " | ".join(_literal(str(text)) for text in value.get("enum", [value.get("const")]))
            lines.append(f"{name}: {_literal(begin)} ({options}) {_literal(end)}")
        else:
            lines += [f"{name}: {_literal(begin)} {name}_text", f"{name}_text[suffix={_literal(end)}]: {_text(value)}"]
        parts.append(name if key in required else f"{name}?")
    head, tail = _parts(form.head, tool.name, form.mid), _parts(form.tail)
    return [*lines, f"{rule}: {head} {' '.join(parts)} {tail}"]


def _python_rules(form: CallForm, rule: str, tool: Tool, schema: dict[str, Any]) -> list[str]:
    """Keyword arguments in the schema's order: texts in the form's quotes, all else as JSON."""
    lines, required = [], schema.get("required") or ()
    shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    rest = ""
    for index, (key, value) in reversed(list(enumerate((schema.get("properties") or {}).items()))):
        name = f"{rule}_{index}"
        begin = key + form.assign
        is_text = isinstance(value, dict) and value.get("type") == "string" and "enum" not in value
        if is_text and form.quote:
            lines += [f"{name}: {_literal(begin + form.quote)} {name}_text"]
            lines += [f"{name}_text[suffix={_literal(form.quote)}]: {_text(value)}"]
        else:
            lines.append(f"{name}: {_literal(begin)} {_json(_with(value, shared), tool)}")
        more = f" ({_literal(', ' if form.assign == '=' else ',')} {rest})" if rest else ""
        more = f"{more}?" if more and not any(other in required for other in _after(schema, key)) else more
        lines.append(f"{name}_on: {name}{more}" + (f" | {rest}" if rest and key not in required else ""))
        rest = f"{name}_on"
    inner = rest if any(key in required for key in schema.get("properties") or {}) else f"{rest}?" if rest else ""
    return [*lines, f"{rule}: {_parts(form.head, tool.name, form.mid)} {inner} {_parts(form.tail)}"]


def _after(schema: dict[str, Any], key: str) -> list[str]:
    keys = list(schema.get("properties") or {})
    return keys[keys.index(key) + 1 :]


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
    return "%json " + json.dumps(inner_schema(schema, tool.schema_field, tool.is_strict))


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
