"""Schemas of real tools: what restricts nothing is no refusal, and no constant is answered as another number."""

from typing import Any

import pytest

from kvloom.contract.errors import BadRequest
from kvloom.server.chat.grammars import json_grammar
from kvloom.server.chat.schemas import plain_schema

STRING = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "plain"),
    [
        ({**STRING, "format": "password"}, STRING),
        ({**STRING, "format": "date"}, {**STRING, "format": "date"}),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, {"type": "integer"}),
        ({"type": "integer", "exclusiveMinimum": -9.3e18, "minimum": 0}, {"type": "integer", "minimum": 0}),
        ({"propertyNames": STRING, "additionalProperties": STRING}, {"additionalProperties": STRING}),
        ({"propertyNames": True}, {}),
        ({"properties": {"a": STRING, "b": {"not": {}}}}, {"properties": {"a": STRING, "b": False}}),
        ({"properties": {"format": {**STRING, "format": "int32"}}}, {"properties": {"format": STRING}}),
        ({"anyOf": [{**STRING, "format": "byte"}, True]}, {"anyOf": [STRING, True]}),
        ({"items": {**STRING, "format": "byte"}}, {"items": STRING}),
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


@pytest.mark.parametrize(
    "schema", [{"propertyNames": {"pattern": "a"}}, {"not": STRING}, {**STRING, "pattern": "(?=a)b"}]
)
def test_what_restricts_and_cannot_be_held_stays_refused(schema: Any):
    with pytest.raises(BadRequest):
        json_grammar(schema, "f")
