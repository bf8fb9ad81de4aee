"""Blocks and tools of /v1/messages that are neither text nor functions: what the model is shown of them."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.models.templates import HERMES, TemplateTokenizer
from tests.support.scripted import scripted_server
from tests.support.servers import MODEL, FakeServer

SAYS = {"answer": "yes"}
TOOL = {"name": "find", "description": "Finds.", "input_schema": {"type": "object", "properties": {}}}
LATER = {**TOOL, "name": "later", "description": "Comes later.", "defer_loading": True}
ASKED = {"role": "user", "content": "hi"}
TOLD = 'This tool can be called now:\n{"name": "later", "description": "Comes later."'


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    """Its model says SAYS["answer"]."""
    with scripted_server(TemplateTokenizer(HERMES), lambda prompt: SAYS["answer"]) as (running, _):
        yield running


def message(server: FakeServer, *turns: Any, answer: str = "yes", status: int = 200, **fields: Any) -> Any:
    SAYS["answer"] = answer
    body = {"model": MODEL, "messages": [ASKED, *turns], "max_tokens": 200, **fields}
    response = server.post("/v1/messages", body)
    assert response.status_code == status, response.text
    told = response.json()
    told["notes"] = response.headers.get("x-warning", "")
    if status == 200:
        stream = server.post("/v1/messages", {**body, "stream": True}).text
        events = [json.loads(block.split("\ndata: ")[1]) for block in stream.split("\n\n")[:-1]]
        starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
        named = ("type", "name")
        assert [[one.get(name) for name in named] for one in starts] == [
            [one.get(name) for name in named] for one in told["content"]
        ]
    return told


def prompt() -> str:
    return TemplateTokenizer.rendered[-1]


def called(name: str = "find", *, kind: str = "tool_use") -> dict[str, Any]:
    return {"type": kind, "id": "t1", "name": name, "input": {"q": "x"}}


def result(content: Any, kind: str = "tool_result") -> dict[str, Any]:
    return {"type": kind, "tool_use_id": "t1", "content": content}


PLAIN = {"type": "text", "media_type": "text/plain", "data": "D"}
DOCUMENT = {"type": "document", "title": "T", "context": "C", "source": PLAIN}
PARTS = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "P"}]}}
WHOLE = {"type": "document", "source": {"type": "content", "content": "W"}}
RESULT = {"type": "search_result", "source": "https://a.b/c", "title": "T", "content": [{"type": "text", "text": "X"}]}


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (DOCUMENT, "T\nC\nD"),
        (PARTS, "P"),
        (WHOLE, "W"),
        (RESULT, "T\nhttps://a.b/c\nX"),
        ({"type": "next_month", "text": "N"}, "N"),
        ({"type": "compaction", "content": "summary"}, "summary"),
    ],
)
def test_the_text_of_a_block_is_shown_in_a_turn_and_in_a_result(server: FakeServer, block: dict[str, Any], text: str):
    message(server, {"role": "user", "content": [block]}, tools=[TOOL])
    assert f"user: hi\nuser: {text}\n" in prompt()
    turns = [{"role": "assistant", "content": [called()]}, {"role": "user", "content": [result([block])]}]
    message(server, *turns, tools=[TOOL])
    assert f"tool: {text}\n" in prompt()


def test_what_ran_elsewhere_is_a_call_and_its_result(server: FakeServer):
    found = [{"type": "web_search_result", "title": "T", "url": "u", "encrypted_content": "secret"}]
    blocks = [
        {"type": "text", "text": "Looking."},
        called("web_search", kind="server_tool_use"),
        result(found, "web_search_tool_result"),
        {"type": "text", "text": "Found."},
    ]
    message(server, {"role": "assistant", "content": blocks}, {"role": "user", "content": "more"}, tools=[TOOL])
    assert (
        'assistant: Looking.<tool_call>{"name": "web_search", "arguments": {"q": "x"}}</tool_call>\n'
        'tool: {"type":"web_search_result","title":"T","url":"u"}\nassistant: Found.\nuser: more'
    ) in prompt()
    assert "secret" not in prompt()
    error = result({"type": "web_search_tool_result_error", "error_code": "unavailable"}, "web_search_tool_result")
    message(server, {"role": "assistant", "content": [*blocks[1:2], error]}, ASKED, tools=[TOOL])
    assert 'tool: {"type":"web_search_tool_result_error","error_code":"unavailable"}\nuser: hi' in prompt()


def test_blocks_that_say_nothing_are_left_out_and_told(server: FakeServer):
    blocks = [{"type": "container_upload", "file_id": "f"}, {"type": "text", "text": "x"}]
    notes = message(server, {"role": "user", "content": blocks})["notes"]
    assert notes.endswith("[0] is left out: the model is not shown blocks of the type 'container_upload'")
    assert "user: x" in prompt()


def test_a_deferred_tool_is_shown_where_a_reference_names_it(server: FakeServer):
    message(server, tools=[TOOL, LATER])
    before = prompt()
    assert "later" not in before
    turns = [
        {"role": "assistant", "content": [called()]},
        {"role": "user", "content": [result([{"type": "tool_reference", "tool_name": "later"}])]},
    ]
    answer = '<tool_call>{"name": "later", "arguments": {}}</tool_call>'
    told = message(server, *turns, tools=[TOOL, LATER], answer=answer)
    assert told["content"][0]["name"] == "later"
    assert prompt().startswith(before.removesuffix("assistant: "))
    assert f"tool: {TOLD}" in prompt()
    known = {"role": "user", "content": [result([{"type": "tool_reference", "tool_name": "find"}])]}
    message(server, *turns, {"role": "assistant", "content": "x"}, known, tools=[TOOL, LATER])
    assert "tool: Tool: find\n" in prompt()


def test_deferred_tools_that_only_anthropic_would_find_are_shown(server: FakeServer):
    told = message(server, tools=[TOOL, LATER, {"type": "tool_search_tool_regex_20251119", "name": "tool_search"}])
    assert '"later"' in prompt()
    assert told["notes"].startswith("tools[2] is left out: 'tool_search_tool_regex_20251119'")
    reference = {"type": "tool_reference", "tool_name": "later"}
    found = {"type": "tool_search_tool_search_result", "tool_references": [reference]}
    blocks = [called("tool_search", kind="server_tool_use"), result(found, "tool_search_tool_result")]
    message(server, {"role": "assistant", "content": blocks}, ASKED, tools=[TOOL, LATER])
    assert f"tool: {TOLD}" in prompt()


def test_tools_are_added_and_removed_within_a_conversation(server: FakeServer):
    added = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "later"}}
    message(server, {"role": "system", "content": [added]}, tools=[TOOL, LATER])
    assert f"system: {TOLD}" in prompt()
    defined = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {**LATER, "name": "own"}}}
    message(server, {"role": "system", "content": [defined]}, tools=[TOOL])
    assert 'system: This tool can be called now:\n{"name": "own"' in prompt()
    removed = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "find"}}
    message(server, {"role": "system", "content": [removed]}, tools=[TOOL])
    assert "system: The tool find cannot be called any more." in prompt()
    definition = {"type": "tool_definition", "definition": {"type": "web_search_20260209"}}
    hosted = {"type": "tool_addition", "tool": definition}
    assert "left out" in message(server, {"role": "system", "content": [hosted]}, tools=[TOOL])["notes"]


@pytest.mark.parametrize(
    ("kind", "name"),
    [("bash_20250124", "bash"), ("text_editor_20250728", "str_replace_based_edit_tool"), ("memory_20250818", "memory")],
)
def test_tools_that_the_client_runs_are_functions(server: FakeServer, kind: str, name: str):
    answer = f'<tool_call>{{"name": "{name}", "arguments": {{"command": "ls"}}}}</tool_call>'
    told = message(server, tools=[{"type": kind, "name": name}], answer=answer)
    assert (told["stop_reason"], told["content"][0]["input"]) == ("tool_use", {"command": "ls"})
    assert f'"name": "{name}"' in prompt()


def test_tools_that_anthropic_runs_are_left_out(server: FakeServer):
    told = message(server, tools=[TOOL, {"type": "web_search_20250305", "name": "web_search"}])
    assert "web_search" not in prompt()
    assert (
        told["notes"] == "tools[1] is left out: 'web_search_20250305' is no tool that this server, or its caller, runs"
    )


def test_more_than_128_tools_are_taken(server: FakeServer):
    message(server, tools=[{"name": f"t{at}", "input_schema": {}} for at in range(200)], status=400)
    assert '"t199"' in prompt()  # which is longer than the context


def test_the_billing_line_of_claude_code_is_no_part_of_the_prompt(server: FakeServer):
    blocks = [{"type": "text", "text": text} for text in ("x-anthropic-billing-header: cc_version=2.1.332.11b;", "Be.")]
    told = message(server, system=blocks)
    assert prompt().startswith("system: Be.\n")
    assert told["notes"] == "the line x-anthropic-billing-header: of the system prompt is left out"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": [{"description": "d"}]}, "tools[0].name: is required"),
        ({"tools": [{"type": "web_search_20250305"}], "tool_choice": {"type": "any"}}, "tool_choice: needs tools"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name: 'find' is there twice"),
        ({"block": {"type": "document", "source": {"type": "base64"}}}, "[0].source.type: must be"),
        ({"block": {"type": "document"}}, "content[0].source: is required"),
        ({"block": {"type": "document", "source": {"type": "text"}}}, "content[0].source.data: is required"),
        ({"block": {"type": "video", "source": {"type": "url"}}}, "content[0]: must be a text block; 'video'"),
        ({"block": {"type": "text"}}, "content[0]: must be a text block"),
        ({"block": {"type": "image", "source": "x"}}, "content[0].source: expected `object`, got `str`"),
        ({"block": {"type": "tool_result", "tool_use_id": "t", "content": 5}}, "content[0].content: expected `arr"),
        ({"block": {"type": "tool_result", "tool_use_id": "t", "content": [{"text": 5}]}}, "content[0].content[0]"),
        ({"block": {"type": "tool_reference"}}, "content[0].tool_name: is required"),
    ],
)  # fmt: skip
def test_what_cannot_be_shown_is_a_400_that_names_the_field(server: FakeServer, fields: dict[str, Any], words: str):
    block = fields.pop("block", None)
    turns = [{"role": "user", "content": [block]}] if block else []
    error = message(server, *turns, status=400, **fields)["error"]["message"]
    assert words in error
