"""Structured output: whatever the model predicts, the answer has the requested form."""

import json
import re
from typing import Any

import pytest
from jsonschema_rs import validate

from tests.support.servers import MODEL, FakeServer, fake_server

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def server():
    """This server speculates, which must not change any answer."""
    with fake_server(num_speculative_tokens=4) as running:
        yield running


def answers(server: FakeServer, count: int = 12, **fields: Any) -> list[str]:
    """The texts of `count` choices, sampled with different seeds."""
    response = server.chat("hi", n=count, seed=5, max_tokens=400, **fields)
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    return [choice["message"]["content"] for choice in choices]


def test_json_schema_answers_are_of_the_schema(server: FakeServer):
    found = [json.loads(text) for text in answers(server, response_format=FORMAT)]
    for value in found:
        validate(SCHEMA, value)
    assert len({json.dumps(value) for value in found}) > 6, "the answers are not all the same"


def test_json_object_answers_are_objects(server: FakeServer):
    body = {"model": MODEL, "prompt": "hi", "response_format": {"type": "json_object"}, "max_tokens": 300}
    for seed in range(10):
        choice = server.post("/v1/completions", {**body, "seed": seed}).json()["choices"][0]
        if choice["finish_reason"] == "stop":  # a model of random letters may generate until the limit
            assert isinstance(json.loads(choice["text"]), dict)
        assert choice["text"].startswith("{")


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": r"[a-c]{3}-\d{2}"}, r"[a-c]{3}-\d{2}"),
        ({"guided_choice": ["yes", "no", 'may"be']}, 'yes|no|may"be'),
        ({"guided_grammar": 'root ::= ("ab" | "cd")+ "."'}, r"(ab|cd)+\."),
        ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
        ({"structured_outputs": {"grammar": 'start: "x" /[0-9]/ "y"'}}, r"x\dy"),
        ({"structured_outputs": {"json": {"type": "integer"}}}, r"-?\d+"),
    ],
)
def test_every_way_to_ask(server: FakeServer, fields: dict[str, Any], pattern: str):
    for text in answers(server, **fields):
        assert re.fullmatch(pattern, text), text


def test_streamed_is_whole_and_cached_is_computed(server: FakeServer):
    body = {"seed": 9, "max_tokens": 300, "response_format": FORMAT}
    whole = server.chat("a", **body).json()["choices"][0]["message"]["content"]
    lines = server.chat("a", stream=True, **body).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == whole


def test_a_preempted_answer_stays_in_its_grammar():
    with fake_server(num_blocks=24, max_batch=8) as server:
        for text in answers(server, 8, response_format=FORMAT):
            validate(SCHEMA, json.loads(text))


def test_beside_a_minimum_length_a_finished_answer_ends(server: FakeServer):
    [text] = answers(server, 1, guided_choice=["no"], min_tokens=50)
    assert text == "no"


def test_tgi_takes_a_grammar_too(server: FakeServer):
    for kind, value in (("regex", r"\d{4}"), ("json", {"type": "boolean"})):
        parameters = {"grammar": {"type": kind, "value": value}, "max_new_tokens": 10}
        text = server.post("/generate", {"inputs": "hi", "parameters": parameters}).json()["generated_text"]
        assert re.fullmatch(r"\d{4}|true|false", text)


def test_a_schema_that_cannot_be_used_is_a_400_with_the_reason(server: FakeServer):
    schema = {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}
    fields = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    response = server.chat("hi", **fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "response_format.json_schema.schema"
    assert "'/nowhere' does not exist" in error["message"]


def test_a_schema_deeper_than_the_stack_is_a_400(server: FakeServer):
    text = "[" * 100
    assert server.chat("hi", guided_json=text).status_code == 400
    assert server.chat("hi", guided_json='{"items":' * 5000 + "1" + "}" * 5000).status_code == 400
