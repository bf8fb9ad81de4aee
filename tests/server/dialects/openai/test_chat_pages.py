"""Requests of chat pages, as their sources build them: Open WebUI 0.12.4 (routers/openai.py, utils/middleware.py)."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.models.templates import HERMES, TemplateTokenizer
from tests.support.scripted import scripted_server
from tests.support.servers import MODEL, FakeServer

CALL = '<tool_call>{"name": "search_web", "arguments": {"query": "kvloom", "count": 3}}</tool_call>'
ASKED = {"role": "user", "content": "hi"}
PARAMETERS = {
    "type": "object",
    "properties": {"query": {"type": "string"}, "count": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
    "required": ["query"],
}
TOOL = {"type": "function", "function": {"name": "search_web", "description": "Search.", "parameters": PARAMETERS}}
CALLED = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "search_web", "arguments": "{}"}}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
OF_MODEL = {
    "temperature": 0.7, "top_p": 0.9, "min_p": 0.0, "max_tokens": 50, "frequency_penalty": 0.0, "presence_penalty": 0.0,
    "reasoning_effort": "medium", "seed": 1, "stop": ["<end>"], "logit_bias": {"5": -100},
}  # fmt: skip
HISTORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": "", "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "call_1", "content": "found"},
    ASKED,
]


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    """Its model calls a tool where it is shown one and no result."""

    def script(prompt: str) -> str:
        return CALL if "search_web" in prompt and "tool: " not in prompt else '{"title": "A chat"}'

    with scripted_server(TemplateTokenizer(HERMES), script) as (running, _):
        yield running


def streamed(server: FakeServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = server.post(path, {"model": MODEL, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("fields", [{}, OF_MODEL, {"max_completion_tokens": 50}])
def test_a_chat_is_streamed_with_its_usage(server: FakeServer, fields: dict[str, Any]):
    events = streamed(server, "/v1/chat/completions", {"messages": HISTORY, "tools": [TOOL], **STREAMED, **fields})
    assert "".join(each["choices"][0]["delta"].get("content") or "" for each in events[:-1]) == '{"title": "A chat"}'
    assert events[-1]["usage"]["completion_tokens"] > 0


def test_a_tool_is_called(server: FakeServer):
    events = streamed(server, "/v1/chat/completions", {"messages": [ASKED], "tools": [TOOL], **STREAMED})
    parts = [part for each in events[:-1] for part in each["choices"][0]["delta"].get("tool_calls", ())]
    assert (parts[0]["index"], parts[0]["function"]["name"]) == (0, "search_web")
    assert json.loads("".join(part["function"]["arguments"] for part in parts)) == {"query": "kvloom", "count": 3}


@pytest.mark.parametrize("limit", [{"max_tokens": 1000}, {"max_completion_tokens": 1000}, {"stop": ["\n"]}])
def test_titles_tags_and_queries_are_whole_answers(server: FakeServer, limit: dict[str, Any]):
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "### Task:\nName it."}], "stream": False, **limit}
    answer = server.post("/v1/chat/completions", asked)
    assert answer.json()["choices"][0]["message"]["content"] == '{"title": "A chat"}'


def test_an_answer_is_continued(server: FakeServer):
    turns = [ASKED, {"role": "assistant", "content": "It is"}]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    for fields in ({}, more):
        assert streamed(server, "/v1/chat/completions", {"messages": turns, **STREAMED, **fields})


def test_an_image_is_refused_by_its_part_where_the_model_sees_none(server: FakeServer):
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,cG5n"}}
    asked = {"model": MODEL, "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}, part]}]}
    answer = server.post("/v1/chat/completions", {**asked, **STREAMED})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[0].content[1].image_url.url")


def test_a_connection_may_be_one_of_responses(server: FakeServer):
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yes"}]},
        {"type": "function_call", "call_id": "call_1", "name": "search_web", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "found"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    ]
    tools = [{"type": "function", **TOOL["function"], "strict": False}]
    fields = {"instructions": "Be brief.", "tools": tools, "max_output_tokens": 50, "stream": True, "temperature": 0.7}
    events = streamed(server, "/v1/responses", {"input": items, **fields})
    [item] = events[-1]["response"]["output"]
    assert (item["type"], item["content"][0]["text"]) == ("message", '{"title": "A chat"}')


def test_models_are_listed_for_both_of_its_kinds_of_connection(server: FakeServer):
    assert [model["id"] for model in server.client.get("/v1/models").json()["data"]] == [MODEL]
    assert server.client.get("/api/tags").json()["models"][0]["model"].startswith(MODEL)
    assert server.client.get("/api/version").json()["version"]
