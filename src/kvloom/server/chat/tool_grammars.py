"""Grammars that make answers call tools, in the form that the model's template shows: Lark, as llguidance takes it."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from kvloom.server.chat.argument_grammars import argument_rules
from kvloom.server.chat.element_grammars import element_rules
from kvloom.server.chat.form import NAME, CallForm
from kvloom.server.chat.grammars import checked_grammar
from kvloom.server.chat.lark_parts import json_part, literal, literals
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
    form = _closed(form)
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
    num_shared = sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(form.lead, form.text_lead, strict=False))
    )
    shared, lead, text_lead = form.lead[:num_shared], form.lead[num_shared:], form.text_lead[num_shared:]
    calls = f"{literal(form, lead)}{'?' if form.lead.isspace() else ''} calls"
    if choice.mode != "auto":
        return _checked({"lark_grammar": "\n".join([*lines, f"start: {literal(form, shared)} {calls}"])})
    if not answer:
        lines += [r"TEXT: /(.|\n)*/", f"start: {literal(form, shared)} ({calls} | {literal(form, text_lead)} TEXT)"]
        return _checked({"lark_grammar": "\n".join(lines)})
    other = _grammars_of(answer)
    lines.append(f"start: {literal(form, shared)} ({calls} | {literal(form, text_lead)} @answer)")
    return _checked({"lark_grammar": "\n".join(lines)}, {**other[0], "name": "answer"}, *other[1:])


def _closed(form: CallForm) -> CallForm:
    """The form with marks where arguments end: what ends the call, if nothing else does."""
    if form.kind == "tagged" and not form.tail.strip() and not form.is_section:
        return replace(form, tail=form.tail + form.end, end="")
    return form


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
    if form.kind in ("tagged", "python"):
        return argument_rules(form, rule, tool, schema)
    if form.kind == "elements":
        return element_rules(form, rule, tool, schema)
    head, tail = literals(form, form.head, tool.name, form.mid), literals(form, form.tail)
    return [f"{rule}: {head} {json_part(schema, tool)} {tail}"]


def _grammars_of(grammar: str) -> list[dict[str, Any]]:
    """A grammar in its general form: a list whose first entry is the start."""
    text = grammar.lstrip()
    if text.startswith("{"):
        found: list[dict[str, Any]] = json.loads(text)["grammars"]
        return found
    return [{"lark_grammar": grammar}]


def _checked(*grammars: dict[str, Any]) -> str:
    return checked_grammar(json.dumps({"grammars": list(grammars)}), "tools")
