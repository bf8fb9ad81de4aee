"""Calls whose arguments are elements: keys are their names; objects and lists are elements within them."""

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.contract.errors import BadRequest
from kvloom.server.chat.elements import options_of
from kvloom.server.chat.events import ChatEvent, TextDelta, ToolCallArguments, ToolCallStart
from kvloom.server.chat.form import KEY, KNOWN, CallForm
from kvloom.server.chat.style import form_of
from kvloom.server.chat.tool_calls import make_parser
from kvloom.server.chat.tool_grammars import tool_grammar
from kvloom.server.chat.tool_prompt import call_text
from kvloom.server.chat.tools import Tool, ToolChoice
from kvloom.server.chat.values import types_of
from tests.support.engine.grammars import accepts
from tests.support.models.templates import TemplateTokenizer

SHOWN = (
    "{% macro shown(v) %}{% if v is mapping %}{% for k, each in v.items() if each is not none %}"
    "@<{{ k }}>{{ shown(each) }}@</{{ k }}>{% endfor %}"
    "{% elif v is string %}{{ v }}{% elif v is iterable %}{% for each in v %}@<li>{{ shown(each) }}@</li>{% endfor %}"
    "{% elif v is not none %}{{ v | tojson }}{% endif %}{% endmacro %}"
)
TEMPLATE = (
    SHOWN + "{% for m in messages %}<r>{{ m.role }}</r>{{ m.content }}{% if m.tool_calls %}@<calls>\n"
    '{% for c in m.tool_calls %}@<call of="{{ c.function.name }}">{{ shown(c.function.arguments) }}@</call>\n'
    "{% endfor %}@</calls>{% endif %}<e>{% endfor %}"
    "{% if add_generation_prompt %}<r>assistant</r>{% endif %}{# tools #}"
)
POINT = {"type": "object", "properties": {"x": {"type": "number"}, "t": {"type": "string"}}, "required": ["x"]}
TREE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/T"}}},
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "string"},
        "n": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "o": {"type": "object"},
        "l": {"type": "array", "items": POINT, "minItems": 1, "maxItems": 2},
        "tree": {"$ref": "#/$defs/T"},
        "e": {"enum": ["x", 3]},
        "c": {"const": "k"},
        "any": {},
        "map": {"type": "object", "additionalProperties": {"type": "boolean"}},
        "empty": {"type": "object", "additionalProperties": False},
        "never": False,
        "all": {"allOf": [{"$ref": "#/$defs/T"}], "description": "a tree"},
        "one": {"allOf": [{"type": "string"}]},
        "some": {
            "type": "object",
            "properties": {"p": {"type": "string"}, "q": {"type": "integer"}},
            "anyOf": [{"required": ["p"]}, {"required": ["q"], "properties": {"r": {"type": "string"}}}],
        },
    },
    "required": ["a"],
    "$defs": {"T": {**TREE, "required": ["v"]}},
}
M3 = KNOWN["minimax_m3"]
PLAIN = CallForm(
    "its own", "elements", "<calls>", "\n</calls>", True, "\n<call>", "<args>", "\n</args></call>", "", "\n<", ">\n",
    value_end=f"\n</{KEY}>", item="li",
)  # fmt: skip
FORMS = {"M3": M3, "lines": PLAIN}
VALUES: list[dict[str, Any]] = [
    {"a": "x"},
    {"a": ""},
    {"a": 'x "q" <b>\n</p> ]z', "n": 7},
    {"a": "1", "o": {}},
    {"a": "x", "o": {"k": [1, True, "s"], "a": {"a": "w"}}},
    {"a": "x", "l": [{"x": 1.5, "t": "2"}, {"x": -3}]},
    {"a": "x", "tree": {"v": 1, "kids": [{"v": 2, "kids": [{"v": 3}]}, {"v": 4}]}},
    {"a": "x", "e": 3},
    {"a": "x", "e": "x", "c": "k"},
    {"a": "x", "any": [1, {"b": ["y"]}]},
    {"a": "x", "any": "some words"},
    {"a": "x", "map": {"p": True, "q": False}},
    {"a": "x", "empty": {}},
    {"a": "x", "all": {"v": 1}, "one": "42", "some": {"p": "1"}},
    {"a": "x", "some": {"q": 1, "r": "2"}},
]
WRONG: list[dict[str, Any]] = [
    {"n": 7},
    {"a": "x", "n": "seven"},
    {"a": "x", "l": []},
    {"a": "x", "l": [{"x": 1}] * 3},
    {"a": "x", "l": [{"t": "y"}]},
    {"a": "x", "l": [{"x": "y"}]},
    {"a": "x", "tree": {"v": 1, "kids": [{"kids": [{"v": 1}]}]}},
    {"a": "x", "e": "y"},
    {"a": "x", "c": "x"},
    {"a": "x", "map": {"p": 1}},
    {"a": "x", "empty": {"p": 1}},
    {"a": "x", "never": 1},
    {"a": "x", "other": 1},
    {"a": "x", "all": {}},
    {"a": "x", "some": {}},
]


def written(*arguments: dict[str, Any]) -> str:
    """An answer with calls of f, as the template shows it."""
    calls = [{"id": "abcdefgh1", "type": "function", "function": {"name": "f", "arguments": one}} for one in arguments]
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "So.", "tool_calls": calls}]
    text = TemplateTokenizer(TEMPLATE).apply_chat_template(messages, tools=[{}], add_generation_prompt=False)
    return text.rpartition("<r>assistant</r>")[2].removesuffix("<e>")


def read(form: CallForm, *pieces: str, is_cut: bool = False) -> tuple[str, list[tuple[str, str]]]:
    """The text, and (name, arguments) of each call of an answer in pieces."""
    parser = make_parser(form, {"f": SCHEMA})
    events: list[ChatEvent] = [event for piece in pieces for event in parser.add(piece)]
    told, names, arguments = "", [], []
    for event in events + parser.finish(is_cut):
        if isinstance(event, TextDelta):
            told += event.text
        elif isinstance(event, ToolCallStart):
            names.append(event.name)
            arguments.append("")
        elif isinstance(event, ToolCallArguments):
            arguments[event.index] += event.text
    return told, list(zip(names, arguments, strict=True))


def parsed(form: CallForm, *pieces: str, is_cut: bool = False) -> tuple[str, list[Any]]:
    told, calls = read(form, *pieces, is_cut=is_cut)
    return told, [json.loads(arguments) for _, arguments in calls]


def grammar(form: CallForm, mode: str = "required", *tools: Tool) -> str:
    return tool_grammar(form, tools or [Tool("f", "", SCHEMA)], ToolChoice(mode), True, "")


def test_the_form_is_found_in_a_template():
    form = form_of(TemplateTokenizer(TEMPLATE), True)
    assert (form.calls.kind, form.found) == ("elements", "the template")
    assert (form.calls.key_begin, form.calls.key_end, form.calls.value_end) == ("@<", ">", f"@</{KEY}>")
    assert (form.calls.item, form.calls.is_section) == ("li", True)


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("arguments", VALUES, ids=str)
def test_what_a_template_shows_is_read_back(arguments: dict[str, Any], size: int):
    form, text = form_of(TemplateTokenizer(TEMPLATE), True).calls, written(arguments, {"a": "two"})
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert parsed(form, *pieces) == ("So.", [arguments, {"a": "two"}])


def test_a_template_may_show_lists_as_JSON():
    template = TEMPLATE.replace("{% macro shown(v) %}", "{% macro inner(v) %}").replace(
        "shown(c.function.arguments)",
        "''}}{% for k, v in c.function.arguments.items() %}@<{{ k }}>{{ v if v is string else v | tojson }}@</{{ k }}>"
        "{% endfor %}{{ ''",
    )
    form = form_of(TemplateTokenizer(template.replace("shown(each)", "inner(each)")), True).calls
    arguments = {"a": "x", "o": {"k": [1]}, "l": [{"x": 1}]}
    text = call_text(form, [("f", arguments)])
    assert (form.kind, form.item) == ("elements", "")
    assert '@<l>[{"x": 1}]@</l>' in text
    assert parsed(form, text) == ("", [arguments])
    assert accepts(grammar(form), text.lstrip())
    assert not accepts(grammar(form), call_text(form, [("f", {"n": 7})]).lstrip())


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("arguments", VALUES, ids=str)
def test_calls_in_texts_are_read_back_and_follow_the_grammar(form: CallForm, arguments: dict[str, Any]):
    text = call_text(form, [("f", arguments), ("f", {"a": "two"})])
    assert parsed(form, text) == ("", [arguments, {"a": "two"}])
    assert accepts(grammar(form), text)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("arguments", WRONG, ids=str)
def test_the_grammar_refuses_what_the_schema_does(form: CallForm, arguments: dict[str, Any]):
    assert not accepts(grammar(form), call_text(form, [("f", arguments)]))


def test_arguments_may_follow_one_of_several_schemas():
    listed = {"properties": {"a": {"type": "array", "items": {"type": "string"}}}, "required": ["a"]}
    either = {"properties": {"k": {"type": "boolean"}}, "required": ["k"], "anyOf": [POINT, listed]}
    schema = {"$ref": "#/$defs/S", "$defs": {"S": either}}
    right = {"k": True, "a": ["1", "2"]}
    wanted = grammar(M3, "required", Tool("f", "", schema))
    assert accepts(wanted, call_text(M3, [("f", right)]))
    assert accepts(wanted, call_text(M3, [("f", {"k": True, "x": 1})]))
    for wrong in ({"k": True}, {"a": ["1"]}, {"k": True, "a": [], "x": 1}):
        assert not accepts(wanted, call_text(M3, [("f", wrong)]))
    parser = make_parser(M3, {"f": schema})
    events = parser.add(call_text(M3, [("f", right)])) + parser.finish()
    assert events == [ToolCallStart(0, "f"), ToolCallArguments(0, json.dumps(right))]


def test_null_has_no_element():
    text = call_text(M3, [("f", {"a": "x", "n": None, "o": {"k": None, "l": [None]}})])
    assert parsed(M3, text) == ("", [{"a": "x", "o": {"l": [""]}}])


def test_the_arguments_of_a_tool_that_is_not_strict_are_free_beside_a_strict_one():
    tools = Tool("f", "", SCHEMA, is_strict=True), Tool("g", "", SCHEMA)
    wanted = grammar(M3, "auto", *tools)
    assert accepts(wanted, "So." + call_text(M3, [("g", {"o": {"k": ["]x", 1]}, "z": "y"})]))
    assert not accepts(wanted, "So." + call_text(M3, [("f", {"o": {}})]))


def test_what_a_grammar_of_elements_cannot_hold_is_refused_where_a_tool_is_strict():
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(BadRequest, match="uniqueItems"):
        grammar(M3, "required", Tool("f", "", schema, is_strict=True))
    assert accepts(grammar(M3, "required", Tool("f", "", schema)), call_text(M3, [("f", {"a": [1, 1]})]))


E = "]<]minimax[>["
HEAD = f'{E}<tool_call>\n{E}<invoke name="f">'


@pytest.mark.parametrize(
    ("inner", "arguments"),
    [
        (f"{E}<n>{E}</n>", {"n": None}),
        (f"{E}<l>{E}</l>{E}<o> {E}</o>{E}<any>{E}</any>", {"l": [], "o": {}, "any": ""}),
        (f'{E}<o>{{"k": [1]}}{E}</o>', {"o": {"k": [1]}}),
        (f"{E}<l>{E}<point>{E}<x>1{E}</x>{E}</point>{E}</l>", {"l": [{"x": 1}]}),
        (f"{E}<o>{E}<item>1{E}</item>{E}</o>", {"o": {"item": 1}}),
        (f"\n{E}<o>\n{E}<k>1{E}</k>\n{E}</o>\n", {"o": {"k": 1}}),
        (f"{E}<any>{E}<k>1{E}</any>", {"any": {"k": 1}}),
        (f"{E}<any>{E}<k>1{E}</k> and more{E}</any>", {"any": f"{E}<k>1{E}</k> and more"}),
        (f"{E}<a>{E}<k>1{E}</k>{E}</a>", {"a": f"{E}<k>1{E}</k>"}),
        (f"{E}<a>x{E}</a> y{E}</a>", {"a": f"x{E}</a> y"}),
        (f"{E}<o>{E}<o>1{E}</o>{E}<k>2{E}</k>{E}</o>", {"o": {"o": 1, "k": 2}}),
        (f"{E}<other>1{E}</other>", {"other": 1}),
        ("", {}),
    ],
)
def test_values_have_the_types_of_the_schema(inner: str, arguments: dict[str, Any]):
    text = f"{HEAD}{inner}{E}</invoke>\n{E}</tool_call>"
    assert parsed(M3, text) == parsed(M3, *text) == ("", [arguments])


CUT = f"{HEAD}{E}<a>x{E}</a>{E}<o>{E}<k>"


@pytest.mark.parametrize(
    ("text", "is_cut", "found"),
    [
        (f"{HEAD}", True, ("", [{}])),
        (f"{HEAD}{E}<a", True, ("", [{}])),
        (f"{HEAD}{E}<a>x{E}</", True, ("", [{}])),
        (f"{HEAD}{E}<a>x{E}</a>", True, ("", [{"a": "x"}])),
        (f"{HEAD}{E}<a>x{E}</a>\n{E}</inv", True, ("", [{"a": "x"}])),
        (f"{CUT}1{E}</k>", True, ("", [{"a": "x"}])),
        (f"{CUT}1{E}</k>{E}</o>", True, ("", [{"a": "x", "o": {"k": 1}}])),
        (f"{CUT}1{E}</k>", False, ("", [{"a": "x", "o": {"k": 1}}])),
        (f"{CUT}1{E}</", False, ("", [{"a": "x", "o": {"k": 1}}])),
        (f"{HEAD}{E}<o>{E}<o>1{E}</o>", True, ("", [{}])),
        (f"{HEAD}{E}<a>x{E}</invoke>\n{E}</tool_call> done", False, ("done", [{"a": "x"}])),
        (f"{HEAD}{E}<a>x{E}</a>{E}</tool_call> done", False, ("done", [{"a": "x"}])),
        (f'{E}<invoke name="f">{E}<a>x{E}</a>{E}</invoke>\n{E}</tool_call> done', False, ("done", [{"a": "x"}])),
        (f'{HEAD}{E}</invoke>{E}<invoke name="f">{E}<a>x{E}</a>{E}</invoke>', False, ("", [{}, {"a": "x"}])),
        (f"{HEAD} no", False, ("no", [{}])),
        (f'{E}<tool_call>{E}<f a="">', False, (f'{E}<tool_call>{E}<f a="">', [])),
        (f"a {E} b ]<]", False, (f"a {E} b ]<]", [])),
    ],
)
def test_calls_that_are_not_whole(text: str, is_cut: bool, found: tuple[str, list[Any]]):
    assert parsed(M3, text, is_cut=is_cut) == parsed(M3, *text, is_cut=is_cut) == found


PIECES = [
    f"{E}<tool_call>", f"{E}</tool_call>", f'{E}<invoke name="f">', f"{E}</invoke>", f"{E}<a>", f"{E}</a>", f"{E}<o>",
    f"{E}</o>", f"{E}<item>", f"{E}</item>", E, "]<", "1", " ", "\n", "text", "<b>",
]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=14), st.lists(st.integers(0, 120)), st.booleans())
def test_pieces_make_no_difference(pieces: list[str], cuts: list[int], is_cut: bool):
    text = HEAD + "".join(pieces)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    whole = parsed(M3, text, is_cut=is_cut)
    assert whole == parsed(M3, *[text[one:other] for one, other in pairwise(places)], is_cut=is_cut)
    assert whole == parsed(M3, *text, is_cut=is_cut)


def test_elements_deeper_than_any_tool_needs_are_a_text():
    num = 2000
    text = f"{HEAD}{E}<any>{f'{E}<k>' * num}1{f'{E}</k>' * num}{E}</any>{E}</invoke>"
    _, (arguments,) = parsed(M3, text)
    value = arguments["any"]
    while isinstance(value, dict):
        value = value["k"]
    assert value.startswith(f"{E}<k>")


def test_a_form_without_an_end_of_the_call_ends_with_its_mark():
    form = replace(PLAIN, is_section=False, head="\n<call>", mid="<args>", tail="")
    assert parsed(form, call_text(form, [("f", {"a": "x"})]) + " done") == ("done", [{"a": "x"}])


@pytest.mark.parametrize(("last", "types"), [({"type": "string"}, {"string"}), ({"$ref": "#/$defs/0"}, None)])
def test_references_may_not_make_endless_work_of_a_short_schema(last: dict[str, Any], types: set[str] | None):
    many = {str(at): {"anyOf": [{"$ref": f"#/$defs/{at + 1}"}] * 20} for at in range(7)}
    root = {"$defs": {**many, "7": last}}
    assert types_of(many["0"], root) == types
    assert len(list(options_of(many["0"], root))) <= 500
