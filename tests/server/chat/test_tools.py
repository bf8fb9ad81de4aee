"""Tools over HTTP: tool_choice is followed, in OpenAI's format, whole and streamed."""

import json
from typing import Any

import pytest
from jsonschema_rs import validate

from tests.support.models.templates import HERMES, LLAMA3, QWEN_CODER, TemplateTokenizer
from tests.support.servers import MODEL, FakeServer, fake_server

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": SCHEMA}}
STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}
OTHER = {"type": "function", "function": {"name": "now"}}
NO_SCHEMA = {"function": {"name": "f", "parameters": {"properties": {"a": {"$ref": "#/nowhere"}}}}}
NAMED = {"type": "function", "function": {"name": "weather"}}
SCHEMAS = {"weather": SCHEMA, "now": {"type": "object", "maxProperties": 0}}


@pytest.fixture(
    scope="module", params=["", HERMES, QWEN_CODER, LLAMA3], ids=["none", "hermes", "qwen3_coder", "llama3"]
)
def styled(request: pytest.FixtureRequest):
    """A server whose chat template uses one of the formats of tool calls, or none."""
    with fake_server(tokenizer=TemplateTokenizer(request.param), max_seq_len=8192) as running:
        yield running


def choice_of(server: FakeServer, **fields: Any) -> dict[str, Any]:
    response = server.chat("hi", **fields)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()["choices"][0]
    return found


def deltas_of(server: FakeServer, **fields: Any) -> tuple[list[dict[str, Any]], str | None]:
    """The deltas of a stream, and its finish_reason."""
    lines = server.chat("hi", stream=True, **fields).text.splitlines()
    choices = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    return [choice["delta"] for choice in choices], choices[-1]["finish_reason"]


@pytest.mark.parametrize("tool_choice", ["required", NAMED])
def test_what_must_be_called_is_called_with_arguments_of_its_schema(styled: FakeServer, tool_choice: Any):
    names = set()
    for seed in range(6):
        choice = choice_of(
            styled, tools=[TOOL, OTHER], tool_choice=tool_choice, parallel_tool_calls=False, seed=seed, max_tokens=600
        )
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        [call] = choice["message"]["tool_calls"]
        assert call["type"] == "function"
        assert call["id"].startswith("call_")
        validate(SCHEMAS[call["function"]["name"]], json.loads(call["function"]["arguments"]))
        names.add(call["function"]["name"])
    assert tool_choice == "required" or names == {"weather"}


@pytest.mark.parametrize("tool_choice", ["required", NAMED])
def test_what_must_be_called_is_called_whatever_the_format_of_answers(styled: FakeServer, tool_choice: Any):
    asked = {"tools": [TOOL], "tool_choice": tool_choice, "response_format": {"type": "json_object"}}
    for seed in range(6):
        choice = choice_of(styled, **asked, parallel_tool_calls=False, seed=seed, max_tokens=600)
        [call] = choice["message"]["tool_calls"]
        validate(SCHEMA, json.loads(call["function"]["arguments"]))
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)


def test_a_stream_of_calls_is_the_whole_in_pieces(styled: FakeServer):
    asked = {"tools": [TOOL, OTHER], "tool_choice": "required", "seed": 3, "max_tokens": 600}
    whole = choice_of(styled, **asked)["message"]["tool_calls"]
    deltas, finish = deltas_of(styled, **asked)
    assert finish == "tool_calls"
    assert deltas[0] == {"role": "assistant", "content": ""}
    calls: list[dict[str, Any]] = []
    for delta in deltas[1:-1]:
        assert set(delta) == {"tool_calls"}
        [part] = delta["tool_calls"]
        if part["index"] == len(calls):
            assert set(part) == {"index", "id", "type", "function"}
            assert part["function"]["arguments"] == ""
            calls.append({"name": part["function"]["name"], "arguments": ""})
        else:
            assert set(part) == {"index", "function"}
            assert set(part["function"]) == {"arguments"}
            calls[part["index"]]["arguments"] += part["function"]["arguments"]
    assert calls == [call["function"] for call in whole]
    assert deltas[-1] == {}


def test_a_strict_tool_is_called_by_its_schema_or_not_at_all(styled: FakeServer):
    for seed in range(8):
        message = choice_of(styled, tools=[STRICT], seed=seed, max_tokens=200)["message"]
        for call in message.get("tool_calls", []):
            validate(SCHEMA, json.loads(call["function"]["arguments"]))


def test_auto_with_a_format_either_calls_or_answers_in_it(styled: FakeServer):
    found = set()
    for seed in range(12):
        message = choice_of(styled, tools=[OTHER], guided_regex="[abc]{4}", seed=seed, max_tokens=60)["message"]
        found.add("call" if message.get("tool_calls") else message["content"][0])
    assert len(found) > 1
    assert all(one in ("a", "b", "c", "call") for one in found)


def test_auto_reads_what_the_model_writes(server: FakeServer):
    text = 'So: <tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
    asked = {"tools": [TOOL], "structured_outputs": {"grammar": f"start: {json.dumps(text)}"}}
    choice = choice_of(server, **asked, temperature=0, max_tokens=200)
    assert choice["message"]["content"] in ("So:", None)
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"


def test_none_leaves_the_tools_out(styled: FakeServer):
    asked = {"max_tokens": 30, "temperature": 0}
    plain = styled.chat("hi", **asked).json()
    none = styled.chat("hi", tools=[TOOL], tool_choice="none", **asked).json()
    assert none["choices"] == plain["choices"]
    assert none["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    assert "tool_calls" not in none["choices"][0]["message"]


def test_one_call_only_when_parallel_calls_are_off(server: FakeServer):
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    asked = {"tools": [OTHER], "guided_grammar": f"start: {json.dumps('So ' + call + call)}", "max_tokens": 200}
    for is_parallel, count in ((True, 2), (False, 1)):
        messages = [
            choice_of(server, **asked, parallel_tool_calls=is_parallel, seed=seed)["message"] for seed in range(8)
        ]
        counts = {len(message["tool_calls"]) for message in messages if message["content"] == "So"}
        assert counts == {count}


def test_calls_cut_by_length_say_so(server: FakeServer):
    choice = choice_of(server, tools=[TOOL], tool_choice="required", max_tokens=50)
    assert choice["finish_reason"] == "length"


def allowed_tools(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_of_the_tools_those_that_are_allowed_may_be_called(styled: FakeServer, mode: str):
    other = {"function": {**TOOL["function"], "name": "clock"}}
    choice = choice_of(styled, tools=[other, TOOL], tool_choice=allowed_tools(mode, "weather"))
    names = {call["function"]["name"] for call in choice["message"].get("tool_calls", ())}
    assert names == {"weather"} or (mode == "auto" and not names)
    assert "clock" not in TemplateTokenizer.rendered[-1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"function": {"description": "d"}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
        (
            {"tools": [{"function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters.type",
        ),
        ({"tools": [NO_SCHEMA], "tool_choice": "required"}, "tools[0].function.parameters"),
        ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tools": [TOOL], "tool_choice": allowed_tools("auto")}, "tool_choice.allowed_tools.tools"),
        (
            {"tools": [TOOL], "tool_choice": allowed_tools("auto", "weather", "g")},
            "tool_choice.allowed_tools.tools[1].function.name",
        ),
        ({"tool_choice": allowed_tools("required", "weather")}, "tool_choice"),
        ({"function_call": {"name": "weather"}}, "function_call"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ],
)
def test_bad_tools_are_a_400_that_names_the_field(server: FakeServer, fields: dict[str, Any], param: str):
    response = server.chat("hi", **fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


CONVERSATION = [
    {"role": "user", "content": "How is Bonn?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}},
            {"id": "call_2", "type": "function", "function": {"name": "now", "arguments": ""}},
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "noon"}]},
]


def prompt_of(template: str, **fields: Any) -> str:
    """The prompt that the engine received."""
    with fake_server(tokenizer=TemplateTokenizer(template), max_seq_len=8192) as server:
        body = {"model": MODEL, "messages": CONVERSATION, "max_tokens": 1, **fields}
        assert server.post("/v1/chat/completions", body).status_code == 200
    return TemplateTokenizer.rendered[-1]


def test_a_call_in_the_older_form_is_refused_by_name(server: FakeServer):
    call = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    response = server.post("/v1/chat/completions", {"messages": [CONVERSATION[0], call], "max_tokens": 1})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[1].function_call"
    assert server.chat("hi", max_tokens=1, function_call="auto").status_code == 200


def test_tool_messages_reach_the_template():
    prompt = prompt_of(HERMES, tools=[TOOL])
    assert json.dumps(TOOL) in prompt
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>' in prompt
    assert '<tool_call>{"name": "now", "arguments": {}}</tool_call>' in prompt
    assert "tool: rain\ntool: noon" in prompt


def test_a_template_that_wants_arguments_as_a_text_gets_it():
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.arguments + ';' }}{% endfor %}"
    template = "{% for m in messages %}" + calls + "{% endfor %}{{ tools }}"
    assert prompt_of(template).startswith('{"city": "Bonn"};')


def test_a_template_without_tools_gets_them_as_text():
    prompt = prompt_of("{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}", tools=[TOOL])
    begin, _, rest = prompt.partition("user: How is Bonn?")
    assert begin.startswith("system: You can call functions")
    assert json.dumps(TOOL["function"]) in begin
    assert 'assistant: <tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>' in rest
    assert "user: <tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response>" in rest


@pytest.mark.parametrize("tool_choice", ["required", NAMED])
def test_an_answer_of_calls_that_is_cut_has_no_text(styled: FakeServer, tool_choice: Any):
    """Wherever the length limit cuts it, the partial call is returned, streamed as well as whole."""
    asked = {"tools": [TOOL, OTHER], "tool_choice": tool_choice, "seed": 3}
    whole = choice_of(styled, **asked, max_tokens=600)["message"]["tool_calls"][0]["function"]
    seen = set()
    for max_tokens in range(1, 90, 8):
        choice = choice_of(styled, **asked, max_tokens=max_tokens)
        assert not choice["message"]["content"], max_tokens
        calls = choice["message"].get("tool_calls", [])
        deltas, finish = deltas_of(styled, **asked, max_tokens=max_tokens)
        assert "".join(delta.get("content") or "" for delta in deltas) == ""
        functions = [part["function"] for delta in deltas for part in delta.get("tool_calls", [])]
        assert "".join(one["arguments"] for one in functions) == "".join(c["function"]["arguments"] for c in calls)
        assert finish == choice["finish_reason"]
        if finish == "length" and calls:
            assert calls[0]["function"]["name"] == whole["name"]
            known = calls[0]["function"]["arguments"]
            assert isinstance(json.loads(known), dict)
            closed = known.rstrip('"}').rstrip("\ufffd")  # of a character cut in two
            assert whole["arguments"].startswith(closed)
        seen.add((finish, len(calls)))
    assert {("length", 0), ("length", 1)} <= seen


def test_an_answer_of_calls_that_a_stop_string_cuts_has_no_text(styled: FakeServer):
    choice = choice_of(styled, tools=[TOOL], tool_choice="required", stop=["weath"], max_tokens=600)
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")
