"""Parsing tool calls from text: however the text is split, the calls are the same; other text stays text."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.contract.errors import BadRequest
from kvloom.server.chat.events import ChatEvent, TextDelta, ToolCallArguments, ToolCallStart
from kvloom.server.chat.form import CHANNELS, KNOWN, REASONING
from kvloom.server.chat.tool_calls import make_parser
from kvloom.server.config.keys import LAYOUT_1
from kvloom.server.serving.parsers import REASONING_PARSERS, TOOL_PARSERS

SCHEMAS: dict[str, dict[str, Any]] = {
    "f": {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}},
    "g": {},
}
PIECES = [
    "<tool_call>", "</tool_call>", '{"name": "f", "arguments": ', '{"name": "g", "parameters": ', '{"a": "x}\\""}',
    "{}", "}", "\n", " ", "hello", "<", "{", '"', ";", ",", '"{}"', "null", '{"arguments": {"n": 1}, "name": "f"}',
    '{"name": "Bob", "age": 3}', "<function=f>", "<parameter=a>", "1", "</parameter>", "</function>", "<|python_tag|>",
    "é",
]  # fmt: skip


def read(form: str, *pieces: str) -> tuple[str, list[tuple[str, str]]]:
    """The text, and (name, arguments) of each call."""
    parser = make_parser(KNOWN[form], SCHEMAS)
    events: list[ChatEvent] = []
    for piece in pieces:
        events += parser.add(piece)
    return joined(events + parser.finish())


def joined(events: list[ChatEvent]) -> tuple[str, list[tuple[str, str]]]:
    text, names, arguments = "", [], []
    for event in events:
        if isinstance(event, TextDelta):
            text += event.text
        elif isinstance(event, ToolCallStart):
            assert event.index == len(names)
            names.append(event.name)
            arguments.append("")
        elif isinstance(event, ToolCallArguments):
            assert event.index == len(names) - 1, "arguments belong to the call that began last"
            arguments[-1] += event.text
    return text, list(zip(names, arguments, strict=True))


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def bare(name: str) -> str:
    return f'{{"name": "{name}", "parameters": {{}}}}'


TWO = hermes("f", "{}") + "\n" + hermes("g", '{"b": [{}, "}"]}')
XML = (
    "Let me.\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n"
    "<parameter=n>\n2\n</parameter>\n</function>\n</tool_call>"
)


@pytest.mark.parametrize(
    ("form", "text", "found"),
    [
        ("hermes", hermes("f", '{"a": "x"}'), ("", [("f", '{"a": "x"}')])),
        ("hermes", hermes("new", "{}"), ("", [("new", "{}")])),
        ("hermes", "Yes.\n" + hermes("f", "{}") + hermes("g", "[1]"), ("Yes." + hermes("g", "[1]"), [("f", "{}")])),
        ("hermes", TWO, ("", [("f", "{}"), ("g", '{"b": [{}, "}"]}')])),
        ("hermes", "a " + hermes("f", "{}") + " b ", ("ab ", [("f", "{}")])),
        ("hermes", '<tool_call>{"arguments": {"n": 1}, "name": "f"}</tool_call>', ("", [("f", '{"n": 1}')])),
        ("hermes", hermes("f", '"{\\"n\\": 1}"'), ("", [("f", '{"n": 1}')])),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', ("", [("f", "{}")])),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "cut', ("", [("f", '{"a": "cut"}')])),
        ("hermes", '<tool_call>{"name": "f", "argu', ('<tool_call>{"name": "f", "argu', [])),
        ("hermes", "<tool_call>no call</tool_call>", ("<tool_call>no call</tool_call>", [])),
        ("hermes", "1 <tool_call 2", ("1 <tool_call 2", [])),
        ("hermes", "<tool_call> <tool_call>" + '{"name": "f"}</tool_call>', ("<tool_call>", [("f", "{}")])),
        ("hermes", hermes("f", "{}")[:-13] + "}" + "</tool_call>", ("}", [("f", "{}")])),
        ("qwen3_coder", XML, ("Let me.", [("f", '{"a": "1", "n": 2}')])),
        ("qwen3_coder", "<tool_call><function=g></function></tool_call>", ("", [("g", "{}")])),
        ("qwen3_coder", "<tool_call><func", ("<tool_call><func", [])),
        ("llama3", '{"name": "f", "parameters": {"a": "x"}}', ("", [("f", '{"a": "x"}')])),
        ("llama3", '<|python_tag|>' + bare("f") + "; " + bare("g"), ("", [("f", "{}"), ("g", "{}")])),
        ("llama3", bare("Bob"), (bare("Bob"), [])),
        ("llama3", '{"name": "f", "age": 3}', ('{"name": "f", "age": 3}', [])),
        ("llama3", "<|python_tag|>print(1)", ("<|python_tag|>print(1)", [])),
        ("llama3", "Hello {you}", ("Hello {you}", [])),
        ("llama3", bare("f") + " ok", ("ok", [("f", "{}")])),
        ("apriel", '<tool_calls>\n[{"name": "f"}]</tool_calls>', ("", [("f", "{}")])),
        ("mistral_list", '[TOOL_CALLS] [\n{"name": "f"},{"name": "g"}]', ("", [("f", "{}"), ("g", "{}")])),
        ("pythonic", "So <|tool_call_start|> [f()]<|tool_call_end|>", ("So", [("f", "{}")])),
        ("apriel", "<tool_calls>\n[1]", ("<tool_calls>\n[1]", [])),
    ],
)  # fmt: skip
def test_what_is_found(form: str, text: str, found: Any):
    assert read(form, text) == found
    assert read(form, *text) == found, "character by character"


@pytest.mark.parametrize("form", KNOWN)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=14), cuts=st.lists(st.integers(0, 200), max_size=8))
def test_pieces_make_no_difference(form: str, pieces: list[str], cuts: list[int]):
    text = "".join(pieces)
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [text[a:b] for a, b in pairwise(bounds)]
    assert read(form, *parts) == read(form, text)


@pytest.mark.parametrize("form", KNOWN)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=14))
def test_text_without_calls_is_whole(form: str, pieces: list[str]):
    text = "".join(pieces)
    found, calls = read(form, text)
    if not calls:
        assert found == text


@given(
    calls=st.lists(
        st.tuples(st.sampled_from("fgh"), st.dictionaries(st.text(max_size=4), st.text(max_size=9))),
        min_size=1,
        max_size=3,
    ),
    words=st.lists(st.sampled_from(["", "so", "a <b", "{x}"]), min_size=4, max_size=4),
)
def test_calls_come_back_and_the_text_around_them_too(calls: list[tuple[str, dict[str, str]]], words: list[str]):
    parts = [word + "\n" + hermes(name, json.dumps(args)) for word, (name, args) in zip(words, calls, strict=False)]
    text, found = read("hermes", *("\n".join(parts) + words[3]))
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
    assert text == "".join(words[: len(calls)]) + words[3]


TYPED: dict[str, Any] = {
    "type": "object",
    "$defs": {"Zip": {"type": "string"}, "Loop": {"$ref": "#/$defs/Loop"}},
    "properties": {
        "text": {"type": "string"},
        "optional": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "listed": {"type": ["string", "null"]},
        "chosen": {"enum": ["1", "2"]},
        "named": {"$ref": "#/$defs/Zip"},
        "whole": {"type": "integer"},
        "either": {"oneOf": [{"type": "integer"}, {"type": "string"}]},
        "loop": {"$ref": "#/$defs/Loop"},
        "missing": {"$ref": "#/$defs/Nothing/x"},
    },
}


@pytest.mark.parametrize(
    ("key", "written", "read"),
    [
        *((key, "12345", "12345") for key in ("text", "optional", "listed", "chosen", "named")),
        *((key, "null", None) for key in ("optional", "listed")),
        *((key, '"1"', "1") for key in ("optional", "listed", "chosen", "named")),  # as a grammar makes them
        *((key, "true", "true") for key in ("optional", "listed", "chosen", "named", "either")),
        *((key, "12345", 12345) for key in ("whole", "either", "loop", "missing", "unknown")),
        ("text", '"1"', '"1"'),
        ("whole", "1.5", 1.5),
        ("whole", "about 5", "about 5"),
        ("unknown", '{"a": [1, "\u00e9"]}', {"a": [1, "é"]}),
        ("unknown", "[1,", "[1,"),
        ("unknown", "NaN", "NaN"),
        ("unknown", "1e999", "1e999"),
    ],
)
def test_a_parameter_has_a_type_that_its_schema_allows(key: str, written: str, read: Any):
    parser = make_parser(KNOWN["qwen3_coder"], {"f": TYPED})
    call = f"<tool_call>\n<function=f>\n<parameter={key}>\n{written}\n</parameter>\n</function>\n</tool_call>"
    _, [(_, arguments)] = joined(parser.add(call) + parser.finish())
    assert json.loads(arguments) == {key: read}


HALF = "\\ud800"  # as JSON writes half of a surrogate pair


@pytest.mark.parametrize(
    ("form", "text", "names"),
    [
        ("hermes", hermes(f"f{HALF}", "{}"), []),
        ("hermes", hermes("f", f'"{{\\"a\\": \\"{HALF}\\"}}"'), []),
        ("hermes", hermes("f", f'{{"a": "{HALF}"}}'), ["f"]),
        ("llama3", bare(f"f{HALF}"), []),
        ("qwen3_coder", f'<tool_call><function=g><parameter=a>"{HALF}"</parameter></function></tool_call>', ["g"]),
        ("qwen3_coder", f'<tool_call><function=g><parameter=a>["{HALF}"]</parameter></function></tool_call>', ["g"]),
    ],
)
def test_half_a_surrogate_pair_reaches_no_answer(form: str, text: str, names: list[str]):
    """It is no text: no answer could be written with it."""
    told, calls = read(form, text)
    assert [name for name, _ in calls] == names
    assert bool(told) == (not names), "what is no call is text"
    for name, arguments in calls:
        (name + arguments).encode()
        json.loads(arguments)


def test_arguments_stream_as_they_come():
    parser = make_parser(KNOWN["hermes"], SCHEMAS)
    assert parser.add('<tool_call>{"name": "f", "arguments": {"a": "on') == [
        ToolCallStart(0, "f"),
        ToolCallArguments(0, '{"a": "on'),
    ]
    assert parser.add("ce") == [ToolCallArguments(0, "ce")]
    assert parser.add('"}}</tool_call>') == [ToolCallArguments(0, '"}')]


@pytest.mark.parametrize(
    ("form", "text", "found"),
    [
        ("hermes", "Let me. <tool_call>", ("Let me. ", [])),
        ("hermes", 'Let me. <tool_call>\n{"name": "get_', ("Let me. ", [])),
        ("hermes", '<tool_call>\n{"name": "f"', ("", [("f", "{}")])),
        ("hermes", '<tool_call>\n{"name": "f", "argu', ("", [("f", "{}")])),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": "x', ("", [("f", '{"a": "x"}')])),
        ("hermes", f"{hermes('f', '{}')[:-3]}", ("", [("f", "{}")])),
        ("hermes", f"{hermes('f', '{}')}\n<tool_call>\n{{", ("", [("f", "{}")])),
        ("hermes", "a <tool_", ("a ", [])),
        ("hermes", "a <", ("a <", [])),
        ("hermes", "a <tool_call> is a mark", ("a <tool_call> is a mark", [])),
        ("qwen3_coder", "<tool_call>\n<function=get_", ("", [])),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\nx", ("", [("f", "{}")])),
        ("llama3", '<|python_tag|>{"name": "get_', ("", [])),
        ("llama3", "<|python_tag|>", ("", [])),
        ("llama3", '{"name": "f", "par', ("", [("f", "{}")])),
        ("llama3", '{"name": "get_', ('{"name": "get_', [])),
        ("llama3", '{"name": "Bob", "age": 3', ('{"name": "Bob", "age": 3', [])),
        ("llama3", f'{bare("f")}; {{"na', ("", [("f", "{}")])),
        ("llama3", f"{bare('f')}; ", ("", [("f", "{}")])),
    ],
)
def test_a_call_that_the_end_cuts_is_no_text(form: str, text: str, found: tuple[str, list[tuple[str, str]]]):
    parser = make_parser(KNOWN[form], SCHEMAS)
    events = [event for char in text for event in parser.add(char)]
    assert joined(events + parser.finish(is_cut=True)) == found


F, G = '{"name": "f", "arguments": {"a": 1}}', '{"name": "g", "arguments": {}}'
CALLS = [("f", '{"a": 1}'), ("g", "{}")]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"```json\n{F}\n```", ("", CALLS[:1])),
        (f"```\n{F}\n```", ("", CALLS[:1])),
        (f"I look.\n\n```json\n{F}\n```\nWait.", ("I look.Wait.", CALLS[:1])),
        (f"```json\n{F}\n{G}\n```", ("", CALLS)),
        (f"```json\n[{F}, {G}]\n```", ("", CALLS)),
        (f"```json\n{F}\n```\n```json\n{G}\n```", ("", CALLS)),
        (f"```json\n{F}\n```\n<tool_call>\n{G}\n</tool_call>", ("", CALLS)),
        ('```json\n{"name": "h", "arguments": {}}\n```', ('```json\n{"name": "h", "arguments": {}}\n```', [])),
        ('```json\n{"name": "f", "age": 3}\n```', ('```json\n{"name": "f", "age": 3}\n```', [])),
        (f"Write ```json\n{F}\n```", (f"Write ```json\n{F}\n```", [])),
        ("```python\nprint()\n```", ("```python\nprint()\n```", [])),
        (f"```python\nx = {F}\n```", (f"```python\nx = {F}\n```", [])),
        ("```json\n[1, 2]\n```", ("```json\n[1, 2]\n```", [])),
    ],
)
def test_a_fenced_block_of_JSON_that_calls_a_tool_is_a_call(text: str, found: tuple[str, list[tuple[str, str]]]):
    for size in (1, 3, 1000):
        parser = make_parser(KNOWN["hermes"], {}, loose={"f": None, "g": None})
        events = [event for at in range(0, len(text), size) for event in parser.add(text[at : at + size])]
        assert joined(events + parser.finish()) == found, size


def test_fenced_blocks_are_texts_where_calls_follow_a_grammar_or_another_form():
    for name, loose in (("hermes", {}), ("mistral", {"f": None}), ("qwen3_coder", {"f": None})):
        parser = make_parser(KNOWN[name], {}, loose=loose)
        assert joined(parser.add(f"```json\n{F}\n```") + parser.finish()) == (f"```json\n{F}\n```", [])


P = bare("f")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"I look.\n{P}", ("I look.", [("f", "{}")])),
        (f"I look.\n  {P}; {bare('g')}\nWait.", ("I look.Wait.", [("f", "{}"), ("g", "{}")])),
        (f"{P} ok\n{P}", ("ok", [("f", "{}"), ("f", "{}")])),
        (f"So {P}", (f"So {P}", [])),
        ("So\n{x}\n" + P, ("So\n{x}", [("f", "{}")])),
        ("So {\n" + P, ("So {", [("f", "{}")])),
        (f"So\n{bare('h')}", (f"So\n{bare('h')}", [])),
        ('So\n{"name": "f"}', ('So\n{"name": "f"}', [])),
    ],
)
def test_a_call_without_a_mark_may_begin_a_line_of_a_text(text: str, found: tuple[str, list[tuple[str, str]]]):
    for size in (1, 3, 1000):
        parser = make_parser(KNOWN["llama3"], {"f": {}, "g": {}}, loose={"f": None, "g": None})
        events = [event for at in range(0, len(text), size) for event in parser.add(text[at : at + size])]
        assert joined(events + parser.finish()) == found, size
    parser = make_parser(KNOWN["llama3"], {"f": {}})
    assert joined(parser.add(f"So\n{P}") + parser.finish()) == (f"So\n{P}", [])


@pytest.mark.parametrize("name", ["toolParser", "reasoningParser"])
def test_the_configuration_takes_the_name_of_every_form_and_its_other_names(name: str):
    key = LAYOUT_1["ModelDeployParam"]["ModelParam"][0][name]
    names, forms = (
        (TOOL_PARSERS, {*KNOWN, *(row.calls.name for row in CHANNELS)})
        if name == "toolParser"
        else (REASONING_PARSERS, {*REASONING, "none"})
    )
    assert set(key.choices) == {"auto", *names}
    assert set(names.values()) == forms
    assert all(names[form] == form for form in forms)
    with pytest.raises(BadRequest, match=r'must be one of "auto", .*"harmony".*, got "hermess"'):
        key.check(name, "hermess")


def test_other_names_are_those_of_the_same_form():
    """Names of vLLM 0.32.0 and SGLang 0.5.23; what these read in a form of its own is not taken for another one."""
    found = [TOOL_PARSERS.get(name) for name in ("mimo", "ling3", "poolside_v1", "qwen3_json", "muse_glimmer")]
    assert found == ["qwen3_coder", "glm45", "glm45", "hermes", "atem"]
    assert not {"longcat", "interns1", "internlm"} & TOOL_PARSERS.keys()
    assert "hunyuan_a13b" not in REASONING_PARSERS, "its answer has marks of its own"
