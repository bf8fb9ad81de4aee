"""Schemas of real tools: what restricts nothing is no refusal, and no constant is answered as another number."""

from typing import Any

import pytest

from kvloom.contract.errors import BadRequest
from kvloom.server.chat.grammars import json_grammar
from kvloom.server.chat.schemas import plain_schema
from kvloom.server.http.job import NOTES_HEADER
from kvloom.server.serving.notes import noting
from tests.support.servers import MODEL, FakeServer

STRING = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "plain"),
    [
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, {"type": "integer"}),
        ({"type": "integer", "exclusiveMinimum": -9.3e18, "minimum": 0}, {"type": "integer", "minimum": 0}),
        ({"propertyNames": STRING, "additionalProperties": STRING}, {"additionalProperties": STRING}),
        ({"propertyNames": True}, {}),
        ({"properties": {"a": STRING, "b": {"not": {}}}}, {"properties": {"a": STRING, "b": False}}),
        ({"anyOf": [{"propertyNames": True}, True]}, {"anyOf": [{}, True]}),
        ({"items": {"propertyNames": True}}, {"items": {}}),
        ({"const": {"format": "byte"}}, {"const": {"format": "byte"}}),
        ({"enum": [1, 2.5, 2**53, "175928847299117063", True]},) * 2,
    ],
)
def test_what_restricts_nothing_is_left_out(schema: Any, plain: Any):
    assert plain_schema(schema, "f") == plain
    json_grammar(schema, "f")


@pytest.mark.parametrize(
    "schema",
    [
        {"const": 175928847299117063},
        {"enum": ["a", 9007199254740993]},
        {"properties": {"a": {"const": {"id": [9007199254740993]}}}},
        {"const": 123456789.12345679},
        {"$defs": {"a": {"const": -9007199254740993}}, "$ref": "#/$defs/a"},
    ],
)
def test_a_constant_of_too_many_digits_is_refused_by_its_value(schema: Any):
    with pytest.raises(BadRequest, match=r"f: holds the constant .*\d{9}.*give it as text"):
        json_grammar(schema, "f")


UNHELD = [
    ({**STRING, "format": "password"}, "f is not held in full: Unknown format: password"),
    ({"properties": {"format": {**STRING, "format": "int32"}}}, "f is not held in full: Unknown format: int32"),
    ({"propertyNames": {"pattern": "a"}}, 'f is not held in full: Unimplemented keys: ["propertyNames"]'),
    ({"not": STRING}, 'f is not held in full: Unimplemented keys: ["not"]'),
    ({**STRING, "pattern": "(?=a)b"}, "pattern '(?=a)b' of the schema is not held"),
    ({**STRING, "pattern": "\\bfoo\\b"}, r"pattern '\\bfoo\\b' of the schema is not held"),
    ({"items": {"anyOf": [{"pattern": "(a)\\1"}]}}, r"pattern '(a)\\1' of the schema is not held"),
    ({"patternProperties": {"(?!a)": STRING, "b": STRING}}, "patternProperties '(?!a)' of the schema is not held"),
]


@pytest.mark.parametrize("depth", [90, 300])  # too many for llguidance, and for Python
@pytest.mark.parametrize("is_strict", [False, True])
def test_a_schema_that_is_nested_too_deeply_is_refused_as_such(depth: int, is_strict: bool):
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(BadRequest, match=r"^f: is nested too deeply$"):
        json_grammar(schema, "f", is_strict)


@pytest.mark.parametrize(("schema", "told"), UNHELD)
def test_what_cannot_be_held_is_left_out_and_told(schema: Any, told: str):
    with noting() as notes:
        json_grammar(schema, "f")
    assert notes == [told]


@pytest.mark.parametrize(("schema", "told"), UNHELD)
def test_of_a_strict_schema_it_is_refused(schema: Any, told: str):
    with pytest.raises(BadRequest, match="f: cannot be used: "), noting() as notes:
        json_grammar(schema, "f", is_strict=True)
    assert not notes


def test_a_pattern_that_can_be_held_is():
    with noting() as notes:
        assert '"pattern":"^a+$"' in json_grammar({**STRING, "pattern": "^a+$"}, "f")
    assert not notes


BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("words", [1, 9000])  # a long body is parsed in another process
def test_the_answer_tells_in_a_header_what_was_left_out(server: FakeServer, is_streamed: bool, words: int):
    schema = {"type": "object", "properties": {"a": {**STRING, "format": "password"}}}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    body = {**BODY, "stream": is_streamed, "metadata": {"filler": "x " * words}}
    answer = server.post("/v1/chat/completions", {**body, "response_format": form})
    assert answer.status_code == 200
    assert answer.headers[NOTES_HEADER].endswith("is not held in full: Unknown format: password")
    form["json_schema"]["strict"] = True
    assert server.post("/v1/chat/completions", {**body, "response_format": form}).status_code == 400
    assert NOTES_HEADER not in server.post("/v1/chat/completions", body).headers


def test_a_note_is_one_line_of_printable_letters_in_a_header(server: FakeServer):
    schema = {**STRING, "format": "a\0b\r\nx-other: c\x7f\u00e9"}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    answer = server.post("/v1/chat/completions", {**BODY, "response_format": form})
    assert answer.headers[NOTES_HEADER].endswith("Unknown format: a?b x-other: c??")
    assert "x-other" not in answer.headers


@pytest.mark.parametrize("is_strict", [False, True])
def test_the_schema_of_a_tool_that_is_not_strict_is_held_as_far_as_it_can_be(server: FakeServer, is_strict: bool):
    parameters = {"type": "object", "properties": {"mail": {**STRING, "pattern": "(?=a)b"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": is_strict}}
    answer = server.post("/v1/chat/completions", {**BODY, "tools": [tool], "tool_choice": "required"})
    assert answer.status_code == (400 if is_strict else 200)
    if not is_strict:
        assert answer.headers[NOTES_HEADER] == "pattern '(?=a)b' of the schema is not held"
