"""Grammars: which texts they accept, for each kind of constraint and for each form of a tool call."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from kvloom.contract.errors import BadRequest
from kvloom.server.chat.form import KNOWN
from kvloom.server.chat.grammars import json_grammar, regex_grammar, text_grammar
from kvloom.server.chat.structural_tags import tag_grammar
from kvloom.server.chat.tool_grammars import tool_grammar
from kvloom.server.chat.tools import Tool, ToolChoice
from tests.support.engine.grammars import accepts

ARABIC_THREE = "\u0663"


def _tagged(format: dict[str, Any]) -> str:
    return tag_grammar({"type": "structural_tag", "format": format}, "tag")


def _of_a_tool(pattern: str) -> str:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": f"^{pattern}$"}}, "required": ["a"]}
    return tool_grammar(KNOWN["qwen3_coder"], [Tool("f", "", schema)], ToolChoice("named", "f"), False, "")


# each option that takes a regular expression: its grammar, and the text around what the expression matches
WAYS: dict[str, tuple[Callable[[str], str], str]] = {
    "regex": (lambda pattern: regex_grammar(pattern, "regex"), "{}"),
    "lark": (lambda pattern: text_grammar(f'start: A "!" // a /\\d/ in a comment\nA: /{pattern}/', "grammar"), "{}!"),
    "schema": (lambda pattern: json_grammar({"type": "string", "pattern": f"^{pattern}$"}, "json"), '"{}"'),
    "tag": (lambda pattern: _tagged({"type": "regex", "pattern": pattern}), "{}"),
    "tool": (
        _of_a_tool,
        "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>",
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r"\d", "3", ARABIC_THREE),
        (r"\w", "_", "\u00e9"),
        (r"[\d.]+", "3.", ARABIC_THREE),
        (r"[^\d]", ARABIC_THREE, "3"),
        (r"\D", ARABIC_THREE, "3"),
        (r"\W", "\u00e9", "e"),
        (r"\s", "\u00a0", "x"),
        (r"a\.\d", "a.1", f"a.{ARABIC_THREE}"),
        (r"a-\d", "a-1", f"a-{ARABIC_THREE}"),
    ],
)
def test_classes_of_a_regular_expression_are_ascii(way: str, pattern: str, right: str, wrong: str):
    make, around = WAYS[way]
    assert accepts(make(pattern), around.format(right))
    assert not accepts(make(pattern), around.format(wrong))


def test_an_escaped_backslash_begins_no_class():
    assert accepts(regex_grammar(r"\\d", "regex"), r"\d")
    assert accepts(text_grammar('start: "\\\\d" A\nA: /\\/\\d/', "grammar"), r"\d/1")


def test_set_operations_of_classes_stay():
    assert accepts(regex_grammar(r"[\w--\d]", "regex"), "a")
    assert not accepts(regex_grammar(r"[\w--\d]", "regex"), "1")
    assert accepts(regex_grammar(r"[+-\d]+", "regex"), "-1+")


AN_INT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
F, G = (
    {"begin": f"<f={name}>", "content": {"type": "json_schema", "json_schema": AN_INT}, "end": "</f>"} for name in "fg"
)
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": [F, G]}
SEPARATED = {"type": "tags_with_separator", "separator": ", ", "tags": [F, G]}
CALL_F, CALL_G = '<f=f>{"a": 1}</f>', '<f=g>{"a": 2}</f>'
THINK = {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}


def _sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def _times(type: str) -> dict[str, Any]:
    return {"type": type, "content": {"type": "const_string", "value": "ab"}}


@pytest.mark.parametrize(
    ("format", "right", "wrong"),
    [
        ({"type": "const_string", "value": 'a"/\n'}, ['a"/\n'], ["a", ""]),
        ({"type": "regex", "pattern": "a/b+"}, ["a/bb"], ["a/"]),
        ({"type": "grammar", "grammar": 'root ::= "x" [0-9]'}, ["x1"], ["x"]),
        ({"type": "json_schema", "json_schema": AN_INT}, ['{"a": 1}'], ["{}"]),
        ({"type": "any_text"}, ["", "a\nb"], []),
        ({"type": "any_text", "excludes": ["a b<", "/"]}, ["a b"], ["x a b< y", "/"]),
        (
            {"type": "or", "elements": [F | {"type": "tag"}, {"type": "const_string", "value": "no"}]},
            [CALL_F, "no"],
            [""],
        ),
        (
            _sequence({"type": "regex", "pattern": "[a-z]+"}, {"type": "const_string", "value": "b"}),
            ["ab", "bb"],
            ["b"],
        ),
        (
            _sequence(THINK, {"type": "json_schema", "json_schema": AN_INT}),
            ['<t>hm</t>{"a": 1}'],
            ['{"a": 1}', "<t></t>"],
        ),
        (_times("optional"), ["", "ab"], ["abab"]),
        (_times("star"), ["", "abab"], ["aba"]),
        (_times("plus"), ["ab", "abab"], [""]),
        (THINK, ["<t></t>", "<t>a\n</t>"], ["<t>a</t>b</t>", "<t>a"]),
        ({**THINK, "end": ["</t>", "</u>"]}, ["<t>a</u>", "<t>a</t>"], ["<t>a</u></t>"]),
        (TRIGGERED, ["", "hi <", CALL_F, f"x{CALL_F}y{CALL_G}"], ["<f=", '<f=f>{"b": 1}</f>', "<f=h>", "a<f=a"]),
        (TRIGGERED | {"at_least_one": True}, [CALL_F, f"{CALL_F}y{CALL_G}z"], ["", f"x{CALL_F}"]),
        (TRIGGERED | {"stop_after_first": True}, ["", "x", f"x{CALL_F}"], [f"{CALL_F}y", CALL_F + CALL_G]),
        (TRIGGERED | {"at_least_one": True, "stop_after_first": True}, [CALL_F, CALL_G], ["", "x", f"{CALL_F}y"]),
        (_sequence(THINK, TRIGGERED), ["<t>a</t>", f"<t></t>b{CALL_F}"], [CALL_F]),
        (SEPARATED, ["", CALL_F, f"{CALL_F}, {CALL_G}"], [f"{CALL_F}, ", CALL_F + CALL_G, "x"]),
        (SEPARATED | {"at_least_one": True}, [CALL_G], [""]),
        (SEPARATED | {"stop_after_first": True}, ["", CALL_F], [f"{CALL_F}, {CALL_G}"]),
    ],
)
def test_structural_tags(format: dict[str, Any], right: list[str], wrong: list[str]):
    grammar = _tagged(format)
    assert [text for text in right if not accepts(grammar, text)] == []
    assert [text for text in wrong if accepts(grammar, text)] == []


def test_the_older_form_of_structural_tags():
    structures = [{"begin": one["begin"], "schema": AN_INT, "end": one["end"]} for one in (F, G)]
    for given in (structures, [{**one, "schema": json.dumps(AN_INT)} for one in structures]):
        grammar = tag_grammar({"structures": given, "triggers": ["<f="]}, "tag")
        assert accepts(grammar, f"x{CALL_F}y{CALL_G}")
        assert not accepts(grammar, '<f=f>{"b": 1}</f>')


DEEP = '{"format": ' + '{"type": "star", "content": ' * 5000 + '{"type": "any_text"}' + "}" * 5000 + "}"


@pytest.mark.parametrize(
    ("tag", "field", "problem"),
    [
        ({}, "tag", "needs either a format"),
        ("x", "tag", "cannot be read"),
        (DEEP, "tag", "nested too deeply"),
        ('"' + "x" * 200_000, "tag", "at most 200000"),
        ({"format": {"type": "token"}}, "tag.format.type", "token"),
        ({"format": {"type": "regex"}}, "tag.format", "pattern"),
        ({"format": {"type": "regex", "pattern": "("}}, "tag", "unclosed group"),
        ({"format": {"type": "regex", "pattern": "a", "flags": "i"}}, "tag.format", "flags"),
        ({"format": _sequence()}, "tag", "empty"),
        ({"format": {**TRIGGERED, "triggers": []}}, "tag", "triggers"),
        ({"format": {**TRIGGERED, "triggers": ["<g"]}}, "tag", "exactly one"),
        ({"format": {**TRIGGERED, "triggers": ["<", "<f"]}}, "tag", "exactly one"),
        ({"format": {**THINK, "end": []}}, "tag", "no end"),
        ({"structures": [{"begin": "<", "schema": "[]", "end": ""}], "triggers": ["<"]}, "tag.structures", "schemas"),
    ],
)
def test_a_structural_tag_that_cannot_be_used_says_why(tag: Any, field: str, problem: str):
    with pytest.raises(BadRequest, match=problem) as raised:
        tag_grammar(tag, "tag")
    assert raised.value.field == field


@pytest.mark.parametrize("is_parallel", [True, False])
def test_an_answer_of_calls_may_end_with_the_line_break_of_a_token_that_ends_a_mark(is_parallel: bool):
    grammar = tool_grammar(KNOWN["hermes"], [Tool("f", "")], ToolChoice("required"), is_parallel, "")
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert accepts(grammar, call)
    assert accepts(grammar, f"{call}\n")
    assert not accepts(grammar, f"{call}\n\n")
    assert accepts(grammar, f"{call}\n{call}\n") == is_parallel
