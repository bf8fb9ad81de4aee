"""Tools, calls and parts of chats that are neither functions nor texts: custom tools, and types of other APIs."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.models.templates import HERMES, TemplateTokenizer
from tests.support.scripted import scripted_server
from tests.support.servers import MODEL, FakeServer

SAYS = {"answer": "yes"}
PATCH = {"type": "custom", "custom": {"name": "patch", "description": "Patches."}}
FIND = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
ASKED = {"role": "user", "content": "hi"}


def script(prompt: str) -> str:
    SAYS["prompt"] = prompt
    return SAYS["answer"]


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    """Its model says SAYS["answer"]."""
    with scripted_server(TemplateTokenizer(HERMES), script) as (running, _):
        yield running


def call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def chat(server: FakeServer, answer: str, *turns: Any, **fields: Any) -> tuple[list[Any], str]:
    """The calls, which the stream has too, without their ids; and the notes."""
    SAYS["answer"] = answer
    body = {"model": MODEL, "messages": [ASKED, *turns], **fields}
    whole = server.post("/v1/chat/completions", body)
    assert whole.status_code == 200, whole.text
    calls = whole.json()["choices"][0]["message"].get("tool_calls") or []
    stream = server.post("/v1/chat/completions", {**body, "stream": True}).text
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    found: list[Any] = []
    for event in events:
        for part in event["choices"][0]["delta"].get("tool_calls", ()):
            if "id" in part:
                found.append({**part, part["type"]: dict(part[part["type"]])})
                continue
            kind = found[part["index"]]["type"]
            for name, text in part[kind].items():
                found[part["index"]][kind][name] = found[part["index"]][kind].get(name, "") + text
    assert [{**one, "id": "", "index": 0} for one in found] == [{**one, "id": "", "index": 0} for one in calls]
    return [{key: value for key, value in one.items() if key != "id"} for one in calls], whole.headers.get(
        "x-warning", ""
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [('{"input": "a\\n\\u00e9"}', "a\né"), ('{"patch": "other"}', "other"), ('{"input": 5}', "5"), ("{}", "{}")],
)
def test_the_input_of_a_custom_tool_is_a_text(server: FakeServer, arguments: str, text: str):
    answer = f"{call('patch', arguments)}\n{call('find', '{}')}\n{call('patch', arguments)}"
    calls, _ = chat(server, answer, tools=[PATCH, FIND])
    custom = {"type": "custom", "custom": {"name": "patch", "input": text}}
    assert calls == [custom, {"type": "function", "function": {"name": "find", "arguments": "{}"}}, custom]


def with_grammar(syntax: str, definition: str) -> dict[str, Any]:
    form = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return {"type": "custom", "custom": {"name": "patch", "format": form}}


def test_a_custom_tools_grammar_is_shown_and_one_that_is_recursive_is_not_held(server: FakeServer):
    chat(server, "yes", tools=[with_grammar("regex", "[ab]+")])
    assert '"pattern": "^(?:[ab]+)$"' in TemplateTokenizer.rendered[-1]
    told = "tools[0].custom.format is told to the model, and not held"
    for definition, wanted in (("start: /a/", ""), ("start: /a/ start?", told)):
        _, notes = chat(server, "yes", tools=[with_grammar("lark", definition)])
        assert (notes, f"(lark):\\n{definition}" in SAYS["prompt"]) == (wanted, True)


def test_calls_of_custom_tools_go_back(server: FakeServer):
    past = {
        "role": "assistant",
        "tool_calls": [{"id": "a", "type": "custom", "custom": {"name": "patch", "input": "x"}}],
    }
    chat(server, "yes", past, {"role": "tool", "tool_call_id": "a", "content": "ok"}, tools=[PATCH])
    shown = call("patch", '{"input": "x"}')
    assert f"{shown}\ntool: ok" in TemplateTokenizer.rendered[-1]


@pytest.mark.parametrize("choice", [{"type": "custom", "custom": {"name": "patch"}}, "allowed"])
def test_a_custom_tool_may_be_chosen(server: FakeServer, choice: Any):
    wanted = [{"type": "custom", "custom": {"name": "patch"}}, {"type": "mcp"}]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": wanted}}
    choice = allowed if choice == "allowed" else choice
    calls, _ = chat(server, call("patch", '{"input": "x"}'), tools=[PATCH, FIND], tool_choice=choice)
    assert [one["type"] for one in calls] == ["custom"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat"])
def test_tools_that_somebody_else_runs_are_left_out_and_told(server: FakeServer, path: str):
    body = {"model": MODEL, "messages": [ASKED], "tools": [{"type": "web_search"}, FIND], "stream": False}
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-warning"].startswith("tools[0] is left out: 'web_search' is no tool")
    assert "web_search" not in TemplateTokenizer.rendered[-1]


def test_parts_of_other_apis_are_shown_or_told(server: FakeServer):
    parts = [
        {"type": "input_text", "text": "one"},
        {"type": "thinking", "thinking": "why"},
        {"type": "x", "text": "two"},
    ]
    _, notes = chat(server, "yes", {"role": "user", "content": parts})
    assert "user: one\ntwo" in TemplateTokenizer.rendered[-1]
    assert notes == "messages[1].content[1] is left out: reasoning is given as reasoning_content"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [with_grammar("lark", "start: nothing")]}, "tools[0].custom.format"),
        ({"tools": [with_grammar("regex", "(a")]}, "tools[0].custom.format"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [PATCH], "tool_choice": {"type": "custom"}}, "tool_choice.custom"),
        ({"tools": [PATCH], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages[0].tool_calls[0].function"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0]"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_a_400_that_names_the_field(server: FakeServer, fields: dict[str, Any], param: str):
    answer = server.post("/v1/chat/completions", {"model": MODEL, "messages": [ASKED], **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_a_byte_order_mark_before_a_body_is_no_part_of_it(server: FakeServer):
    body = b"\xef\xbb\xbf" + json.dumps({"model": MODEL, "messages": [ASKED], "max_tokens": 1}).encode()
    assert server.client.post("/v1/chat/completions", content=body).status_code == 200
