"""Reasoning over HTTP: it is separate from the answer, limited in length, and precedes tool calls and formats."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.models.templates import HERMES, QWEN3, R1, TemplateTokenizer
from tests.support.servers import FakeServer, fake_server

TOOL = {"type": "function", "function": {"name": "now"}}


@pytest.fixture(scope="module")
def r1() -> Iterator[FakeServer]:
    """Its template opens <think> in the prompt."""
    with fake_server(tokenizer=TemplateTokenizer(R1)) as server:
        yield server


@pytest.fixture(scope="module")
def qwen3() -> Iterator[FakeServer]:
    """The model opens <think> itself; with enable_thinking false the prompt contains an empty, closed block."""
    with fake_server(tokenizer=TemplateTokenizer(QWEN3)) as server:
        yield server


def ask(server: FakeServer, **fields: Any) -> dict[str, Any]:
    response = server.chat("hi", **{"seed": 5, "max_tokens": 120, **fields})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def message_of(answer: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = answer["choices"][0]["message"]
    return found


def test_reasoning_is_apart_under_both_names_and_counted(r1: FakeServer):
    answer = ask(r1, thinking_token_budget=20, guided_regex="[a-z]{3}")
    message = message_of(answer)
    assert message["reasoning"] == message["reasoning_content"] != ""
    assert re.fullmatch("[a-z]{3}", message["content"])
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 20 + len("</think>")


def test_its_stream_is_the_whole_in_pieces(r1: FakeServer):
    fields = {"thinking_token_budget": 20, "guided_regex": "[a-z]{3}", "stream_options": {"include_usage": True}}
    whole = ask(r1, **{**fields, "stream_options": None})
    response = r1.chat("hi", stream=True, seed=5, max_tokens=120, **fields)
    chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == message_of(whole)["reasoning"]
    assert "".join(delta.get("content", "") for delta in deltas) == message_of(whole)["content"]
    assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in deltas)
    assert chunks[-1]["usage"]["completion_tokens_details"] == whole["usage"]["completion_tokens_details"]


def test_calls_come_after_the_reasoning(r1: FakeServer):
    answer = ask(r1, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, thinking_token_budget=9)
    message = message_of(answer)
    assert message["reasoning"]
    assert message["content"] is None
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "now", "arguments": "{}"}]
    assert answer["choices"][0]["finish_reason"] == "tool_calls"


def test_an_answer_cut_in_its_reasoning_has_no_text(r1: FakeServer):
    answer = ask(r1, max_tokens=4, ignore_eos=True)
    assert message_of(answer)["content"] == ""
    assert len(message_of(answer)["reasoning"].strip()) > 0
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 4


def test_a_budget_or_a_format_opens_the_reasoning_where_the_model_would(qwen3: FakeServer):
    message = message_of(ask(qwen3, guided_regex="[a-z]{3}", thinking_token_budget=12))
    assert TemplateTokenizer.rendered[-1].endswith("assistant: ")
    assert message["reasoning"]
    assert re.fullmatch("[a-z]{3}", message["content"])


@pytest.mark.parametrize(
    "fields", [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}], ids=str
)
def test_without_thinking_the_format_begins_at_once(qwen3: FakeServer, fields: dict[str, Any]):
    answer = ask(qwen3, guided_regex="[a-z]{3}", **fields)
    assert TemplateTokenizer.rendered[-1].endswith("<think>\n\n</think>\n\n")
    assert "reasoning" not in message_of(answer)
    assert re.fullmatch("[a-z]{3}", message_of(answer)["content"])
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


def test_effort_and_verbosity_reach_the_template():
    template = "{{ reasoning_effort }} {{ verbosity }} {{ enable_thinking }} {{ messages[0].content }}"
    with fake_server(tokenizer=TemplateTokenizer(template)) as server:
        ask(server, reasoning_effort="max", verbosity="low")
        assert TemplateTokenizer.rendered[-1] == "max low  hi"
        ask(server, reasoning_effort="none", verbosity="high")
        assert TemplateTokenizer.rendered[-1] == " high False hi"


def test_earlier_reasoning_reaches_the_template():
    with fake_server(tokenizer=TemplateTokenizer("{{ messages[0].reasoning_content }}")) as server:
        for name in ("reasoning", "reasoning_content"):
            message = {"role": "assistant", "content": "a", name: "because"}
            response = server.post("/v1/chat/completions", {"messages": [message], "max_tokens": 2})
            assert response.status_code == 200
            assert TemplateTokenizer.rendered[-1] == "because"


def test_a_template_that_marks_no_reasoning_has_none():
    with fake_server(tokenizer=TemplateTokenizer(HERMES)) as server:
        text = "<think>a</think>b"
        message = message_of(ask(server, guided_choice=[text], thinking_token_budget=3))
        assert message["content"] == text
        assert "reasoning" not in message
