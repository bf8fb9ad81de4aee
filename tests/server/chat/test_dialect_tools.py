"""Tools and reasoning in /v1/responses and /v1/messages: tool choice, tool results, and reasoning in requests and
answers.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema_rs import validate

from tests.support.models.templates import HERMES, R1, TemplateTokenizer
from tests.support.servers import MODEL, FakeServer, fake_server

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION = {"type": "function", "name": "weather", "description": "Of a city.", "parameters": SCHEMA, "strict": True}
TOOL = {"name": "weather", "description": "Of a city.", "input_schema": SCHEMA}
HELLO = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def hermes() -> Iterator[FakeServer]:
    with fake_server(tokenizer=TemplateTokenizer(HERMES), max_seq_len=8192) as running:
        yield running


@pytest.fixture(scope="module")
def thinking() -> Iterator[FakeServer]:
    """Its prompts end with <think>, and the fake model never ends its reasoning."""
    with fake_server(tokenizer=TemplateTokenizer(R1), max_seq_len=8192, has_eos=False) as running:
        yield running


def respond(server: FakeServer, **fields: Any) -> Any:
    body = {"model": MODEL, "input": "hi", "max_output_tokens": 600, "seed": 3, **fields}
    response = server.post("/v1/responses", body)
    assert response.status_code == 200, response.text
    return events_of(response.text) if fields.get("stream") else response.json()


def message(server: FakeServer, **fields: Any) -> Any:
    response = server.post(
        "/v1/messages", {"model": MODEL, "messages": [HELLO], "max_tokens": 600, "seed": 3, **fields}
    )
    assert response.status_code == 200, response.text
    return events_of(response.text) if fields.get("stream") else response.json()


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(block.split("\ndata: ")[1]) for block in text.split("\n\n")[:-1]]


ONE = {"parallel_tool_calls": False, "tools": [FUNCTION]}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_response_calls_what_it_must(hermes: FakeServer, choice: Any):
    answer = respond(hermes, **ONE, tool_choice=choice)
    [call] = answer["output"]
    assert (call["type"], call["name"], call["status"]) == ("function_call", "weather", "completed")
    validate(SCHEMA, json.loads(call["arguments"]))
    assert (answer["tools"], answer["tool_choice"], answer["parallel_tool_calls"]) == ([FUNCTION], choice, False)
    events = respond(hermes, **ONE, tool_choice=choice, stream=True)
    pieces = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert len(pieces) > 1
    assert "".join(pieces) == call["arguments"]
    assert events[-1]["response"]["output"][0]["arguments"] == call["arguments"]


def test_calls_and_their_results_go_back_as_input(hermes: FakeServer):
    items = [
        HELLO,
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Ulm", "days": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": '{"city": "Bonn", "days": 2}'},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "sun"}]},
    ]
    respond(hermes, input=items, tools=[FUNCTION], max_output_tokens=1)
    assert TemplateTokenizer.rendered[-1].split("</tool_call>\n", 1)[1] == (
        "user: hi\nassistant: "
        '<tool_call>{"name": "weather", "arguments": {"city": "Ulm", "days": 1}}</tool_call>'
        '<tool_call>{"name": "weather", "arguments": {"city": "Bonn", "days": 2}}</tool_call>\n'
        "tool: rain\ntool: sun\nassistant: "
    )


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_of_the_tools_those_that_are_allowed_may_be_called(hermes: FakeServer, mode: str):
    other = {**FUNCTION, "name": "clock"}
    choice = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "weather"}]}
    answer = respond(hermes, tools=[other, FUNCTION], tool_choice=choice, parallel_tool_calls=False)
    assert (answer["tool_choice"], [tool["name"] for tool in answer["tools"]]) == (choice, ["clock", "weather"])
    rendered = TemplateTokenizer.rendered[-1]
    assert ('"weather"' in rendered, '"clock"' in rendered) == (True, False)
    names = {item["name"] for item in answer["output"] if item["type"] == "function_call"}
    assert names == {"weather"} or (mode == "auto" and not names)


def test_a_response_without_tools_to_call_calls_none(hermes: FakeServer):
    answer = respond(hermes, tools=[FUNCTION], tool_choice="none", max_output_tokens=20)
    assert [item["type"] for item in answer["output"]] == ["message"]
    assert "weather" not in TemplateTokenizer.rendered[-1]
    assert respond(hermes, tool_choice="auto", tools=[], max_output_tokens=1)["tools"] == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        (
            {"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
            "tool_choice.tools",
        ),
        (
            {
                "tools": [FUNCTION],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [{"type": "function", "name": "clock"}],
                },
            },
            "tool_choice.tools[0].name",
        ),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools[1].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"input": [HELLO, {"type": "function_call", "call_id": "c"}]}, "input[1].name"),
        ({"input": [HELLO, {"type": "function_call_output", "output": "x"}]}, "input[1].call_id"),
    ],
)
def test_bad_tools_of_a_response_are_named(hermes: FakeServer, fields: dict[str, Any], param: str):
    response = hermes.post("/v1/responses", {"model": MODEL, "input": "hi", **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_message_uses_what_it_must(hermes: FakeServer, choice: dict[str, Any]):
    asked = {"tools": [TOOL], "tool_choice": {**choice, "disable_parallel_tool_use": True}}
    answer = message(hermes, **asked)
    [block] = answer["content"]
    assert (block["type"], block["name"], answer["stop_reason"]) == ("tool_use", "weather", "tool_use")
    validate(SCHEMA, block["input"])
    events = message(hermes, **asked, stream=True)
    pieces = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
    assert json.loads("".join(pieces)) == block["input"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_uses_and_their_results_go_back_as_messages(hermes: FakeServer):
    messages = [
        HELLO,
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Let me look."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Ulm", "days": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "is_error": True, "content": "no such city"},
                {"type": "text", "text": "And now?"},
            ],
        },
    ]
    asked = {"messages": messages, "tools": [TOOL]}
    message(hermes, **asked, max_tokens=1)
    text = TemplateTokenizer.rendered[-1]
    assert text.split("</tool_call>\n", 1)[1] == (
        "user: hi\nassistant: Let me look."
        '<tool_call>{"name": "weather", "arguments": {"city": "Ulm", "days": 1}}</tool_call>\n'
        "tool: Error: no such city\nuser: And now?\nassistant: "
    )
    counted = hermes.post("/v1/messages/count_tokens", {"model": MODEL, **asked}).json()
    assert counted == {"input_tokens": len(text)}


def test_a_message_without_tools_to_use_uses_none(hermes: FakeServer):
    answer = message(hermes, tools=[TOOL], tool_choice={"type": "none"}, max_tokens=20)
    assert {block["type"] for block in answer["content"]} <= {"text"}
    assert "weather" not in TemplateTokenizer.rendered[-1]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type: must be"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name: is required"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: needs tools"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        (
            {"messages": [HELLO, {"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}, HELLO]},
            "messages[1].content[0].name: is required",
        ),
    ],
)
def test_bad_tools_of_a_message_are_named(hermes: FakeServer, fields: dict[str, Any], words: str):
    response = hermes.post("/v1/messages", {"model": MODEL, "messages": [HELLO], "max_tokens": 5, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(words)


def test_thoughts_are_told_apart(thinking: FakeServer):
    answer = respond(thinking, max_output_tokens=12)
    [item] = answer["output"]
    assert (item["type"], item["status"]) == ("reasoning", "incomplete")
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == 12
    [block] = message(thinking, max_tokens=12, temperature=1)["content"]
    assert (block["type"], block["signature"]) == ("thinking", "")
    assert len(block["thinking"].strip()) > 0
    events = message(thinking, max_tokens=12, stream=True)
    assert {event["delta"]["type"] for event in events if event["type"] == "content_block_delta"} == {"thinking_delta"}


def test_a_budget_ends_the_thoughts(thinking: FakeServer):
    fields = {"thinking": {"type": "enabled", "budget_tokens": 5}, "max_tokens": 40}
    thought, text = message(thinking, **fields)["content"]
    assert (thought["type"], text["type"]) == ("thinking", "text")
    assert len(thought["thinking"]) <= 5
    kinds = [
        event["content_block"]["type"] for event in message(thinking, **fields, stream=True) if "content_block" in event
    ]
    assert kinds == ["thinking", "text"]


def test_an_answer_cannot_be_begun_for_a_model_that_thinks_first(thinking: FakeServer):
    messages = [HELLO, {"role": "assistant", "content": "Once"}]
    response = thinking.post("/v1/messages", {"model": MODEL, "messages": messages, "max_tokens": 5})
    assert response.status_code == 400
    assert "while the model thinks" in response.json()["error"]["message"]


def test_earlier_thoughts_reach_the_template_as_the_assistants():
    template = "{% for m in messages %}{{ m.role }}: ({{ m.reasoning_content }}) {{ m.content }}\n{% endfor %}"
    with fake_server(tokenizer=TemplateTokenizer(template)) as server:
        thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
        said = {"role": "assistant", "content": "yes"}
        respond(server, input=[HELLO, thought, said, HELLO], max_output_tokens=1)
        first = TemplateTokenizer.rendered[-1]
        blocks = [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "yes"}]
        message(server, messages=[HELLO, {"role": "assistant", "content": blocks}, HELLO], max_tokens=1)
    assert first == TemplateTokenizer.rendered[-1]
    assert "assistant: (hm) yes\n" in first


@pytest.mark.parametrize("max_tokens", [1, 5, 20, 33, 40, 60])
def test_a_call_that_is_cut_leaks_no_markup_into_other_dialects(hermes: FakeServer, max_tokens: int):
    asked = {**ONE, "tool_choice": "required", "max_output_tokens": max_tokens}
    answer, events = respond(hermes, **asked), respond(hermes, **asked, stream=True)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    for output in (answer["output"], events[-1]["response"]["output"]):
        texts = [part["text"] for item in output for part in item.get("content", [])]
        assert "".join(texts) == ""
        assert {item["status"] for item in output} == {"incomplete"}
    asked = {"tools": [TOOL], "tool_choice": {"type": "any"}, "max_tokens": max_tokens}
    told = message(hermes, **asked)
    assert told["stop_reason"] == "max_tokens"
    assert [block["type"] for block in told["content"]] in ([], ["tool_use"])
    assert all(event.get("delta", {}).get("type") != "text_delta" for event in message(hermes, **asked, stream=True))
