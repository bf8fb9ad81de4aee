"""Grammars that make answers call tools, in the form that the model's template shows: Lark, as llguidance takes it."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvloom.server.chat.element_grammars import element_rules
from kvloom.server.chat.form import NAME, TYPE, CallForm
from kvloom.server.chat.grammars import checked_grammar
from kvloom.server.chat.lark_parts import json_part, literal, literals, open_text
from kvloom.server.chat.tools import Tool, ToolChoice


def has_grammar(tools: Sequence[Tool], choice: ToolChoice, answer: str) -> bool:
    """Whether tool_grammar restricts the answer."""
    may_call = bool(tools) and choice.mode != "none"
    return bool(answer) or (may_call and (choice.mode != "auto" or any(tool.is_strict for tool in tools)))


def tool_grammar(form: CallForm, tools: Sequence[Tool], choice: ToolChoice, is_parallel: bool, answer: str) -> str:
    """The grammar of an answer; "" = unrestricted. `answer`: grammar of an answer without calls, "" = unrestricted;
    there is none where calls are required.

    Raises BadRequest that names the tool whose schema cannot be used.
    """
    if not has_grammar(tools, choice, answer):
        return ""
    if choice.mode == "none" or not tools:
        return _with_lead(form, answer)
    if choice.mode == "named":
        tools, is_parallel = [tool for tool in tools if tool.name == choice.name], False
    is_parallel = is_parallel and not form.is_single
    lines = []
    for index, tool in enumerate(tools):
        schema = tool.schema if tool.is_strict or choice.mode != "auto" else {"type": "object"}
        lines += _call_rules(form, index, tool, schema)
    lines.append("body: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    if choice.mode == "auto" and not answer and not form.text_lead:
        lines += _free_rules(form, is_parallel)
        return _checked({"lark_grammar": "\n".join(lines)})
    begin, end = literal(form, form.begin), literal(form, form.end)
    lines.append("call: body" if form.is_section or form.address else f"call: {begin} body {end}")
    between = literal(form, form.between)
    more = f" ({between} call)*" if is_parallel else ""
    # a token may hold the end of a mark and a line break, with which the answer may end too
    last = f" {between}?" if form.between.isspace() else ""
    lines.append(f"calls: {begin} call{more} {end}" if form.is_section else f"calls: call{more}{last}")
    lead, text_lead = literal(form, form.lead), literal(form, form.text_lead.removeprefix(form.lead))
    if choice.mode != "auto":
        return _checked({"lark_grammar": "\n".join([*lines, f"start: {lead} calls"])})
    if not answer:
        lines += [r"TEXT: /(.|\n)*/", f"start: {lead} (calls | {text_lead} TEXT)"]
        return _checked({"lark_grammar": "\n".join(lines)})
    other = _grammars_of(answer)
    lines.append(f"start: {lead} (calls | {text_lead} @answer)")
    return _checked({"lark_grammar": "\n".join(lines)}, {**other[0], "name": "answer"}, *other[1:])


def _with_lead(form: CallForm, answer: str) -> str:
    """The grammar of an answer behind what stands before its text."""
    if not answer or not form.text_lead:
        return answer
    other = _grammars_of(answer)
    start = {"lark_grammar": f"start: {literal(form, form.text_lead)} @answer"}
    return json.dumps({"grammars": [start, {**other[0], "name": "answer"}, *other[1:]]})


def _free_rules(form: CallForm, is_parallel: bool) -> list[str]:
    """Free text in which every call follows its schema. The mark of a call is a special token, or a lexeme that ends as
    early as possible.
    """
    between, end = literal(form, form.between), literal(form, form.end)
    if not form.begin:  # the whole answer is a call
        more = f" ({between} body)*" if is_parallel else ""
        return [f"start: body{more} | TEXT?", r"TEXT: /[^{](.|\n)*/"]
    more = f" ({between} body)*" if is_parallel and form.is_section else ""
    many = "*" if is_parallel and not form.is_section else "?"
    first = next(((text, id) for text, id in form.special_ids if form.begin.startswith(text)), None)
    if first is not None:
        text, id = first
        mark = f"<[{id}]> {literal(form, form.begin[len(text) :])}"
        return [f"start: free{many} other*", f"free: other* {mark} body{more} {end}", f"other: <[^{id}]>"]
    return [
        f"start: free{many} TEXT",
        f"free: mark body{more} {end}",
        f"mark[lazy]: TEXT {literal(form, form.begin)}",
        r"TEXT: /(.|\n)*/",
    ]


def _call_rules(form: CallForm, index: int, tool: Tool, schema: dict[str, Any]) -> list[str]:
    """A call, without the marks that may stand around several."""
    rule = f"call_{index}"
    if form.address:
        address = literal(form, form.address.replace(NAME, tool.name))
        lines = _call_rules(replace(form, address=""), index, tool, schema)
        last = lines[-1].removeprefix(f"{rule}: ")
        return [*lines[:-1], f"{rule}: {address} {literal(form, form.begin)} {last} {literal(form, form.end)}"]
    if form.kind == "tagged":
        return _tagged_rules(form, rule, tool, schema)
    if form.kind == "elements":
        return element_rules(form, rule, tool, schema)
    if form.kind == "python":
        return _python_rules(form, rule, tool, schema)
    head, tail = literals(form, form.head, tool.name, form.mid), literals(form, form.tail)
    return [f"{rule}: {head} {json_part(schema, tool)} {tail}"]


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
            type = str(value.get("type", "object")) if isinstance(value, dict) else "object"
            other = form.other_end.replace(TYPE, "number" if type == "integer" else type)
            begin = f"{form.key_begin}{key}{other or form.key_end}"
            lines.append(f"{name}: {literal(form, begin)} {json_part(_with(value, shared), tool)} {literal(form, end)}")
        elif "enum" in value or "const" in value:
            options = " | ".join(literal(form, str(text)) for text in value.get("enum", [value.get("const")]))
            lines.append(f"{name}: {literal(form, begin)} ({options}) {literal(form, end)}")
        else:
            lines += open_text(form, name, begin, end, value)
        parts.append(name if key in required else f"{name}?")
    if _is_free(schema):
        lines.append(_free_argument(form, f"{rule}_any", tool))
        parts.append(f"{rule}_any*")
    head, tail = literals(form, form.head, tool.name, form.mid), literals(form, form.tail)
    return [*lines, f"{rule}: {head} {' '.join(parts)} {tail}"]


def _is_free(schema: dict[str, Any]) -> bool:
    """Whether arguments may have any names."""
    return not schema.get("properties") and schema.get("additionalProperties") is not False


def _free_argument(form: CallForm, name: str, tool: Tool) -> str:
    """Rule `name`: a key of any name, and its value."""
    begin, end = f"{literal(form, form.key_begin)} {_KEY} {literal(form, form.key_end)}", literal(form, form.value_end)
    rules = f"{name}: {begin} {name}_text"
    if form.other_end:
        before, is_typed, after = form.other_end.partition(TYPE)
        said = literal(form, before) + (
            f" /number|boolean|null|object|array/ {literal(form, after)}" if is_typed else ""
        )
        rules += f" | {literal(form, form.key_begin)} {_KEY} {said} {json_part({}, tool)} {end}"
    return "\n".join([rules, *open_text(form, f"{name}_text", "", form.value_end, {})])


_WORD = "/[A-Za-z_][A-Za-z0-9_]*/"
_KEY = r"/[^<>=\"\n]+/"


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
            lines += open_text(form, name, begin + form.quote, form.quote, value)
        else:
            lines.append(f"{name}: {literal(form, begin)} {json_part(_with(value, shared), tool)}")
        more = f" ({literal(form, ', ' if form.assign == '=' else ',')} {rest})" if rest else ""
        more = f"{more}?" if more and not any(other in required for other in _after(schema, key)) else more
        lines.append(f"{name}_on: {name}{more}" + (f" | {rest}" if rest and key not in required else ""))
        rest = f"{name}_on"
    if _is_free(schema):
        value = json_part({}, tool)
        if form.quote:
            value = f"({value} | {rule}_text)"
            lines += open_text(form, f"{rule}_text", form.quote, form.quote, {})
        lines.append(f"{rule}_any: {_WORD} {literal(form, form.assign)} {value}")
        comma = literal(form, ", " if form.assign == "=" else ",")
        lines.append(f"{rule}_all: {rule}_any ({comma} {rule}_any)*")
        rest = f"{rule}_all"
    inner = rest if any(key in required for key in schema.get("properties") or {}) else f"{rest}?" if rest else ""
    return [*lines, f"{rule}: {literals(form, form.head, tool.name, form.mid)} {inner} {literals(form, form.tail)}"]


def _after(schema: dict[str, Any], key: str) -> list[str]:
    keys = list(schema.get("properties") or {})
    return keys[keys.index(key) + 1 :]


def _with(schema: Any, shared: dict[str, Any]) -> Any:
    return {**shared, **schema} if isinstance(schema, dict) else schema


def _grammars_of(grammar: str) -> list[dict[str, Any]]:
    """A grammar in its general form: a list whose first entry is the start."""
    text = grammar.lstrip()
    if text.startswith("{"):
        found: list[dict[str, Any]] = json.loads(text)["grammars"]
        return found
    return [{"lark_grammar": grammar}]


def _checked(*grammars: dict[str, Any]) -> str:
    return checked_grammar(json.dumps({"grammars": list(grammars)}), "tools")
