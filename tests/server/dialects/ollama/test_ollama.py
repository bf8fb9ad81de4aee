"""Ollama's /api/chat and /api/generate over HTTP: streamed lines and whole answers, options, formats, tools,
thinking.
"""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from jsonschema_rs import validate

from kvloom.contract.request import Delta, FinishReason
from kvloom.contract.sampling import SamplingParams
from kvloom.rank.fake import ByteTokenizer
from kvloom.server.chat.events import ChatEvent, ToolCallArguments, ToolCallStart
from kvloom.server.dialects.ollama import shapes
from kvloom.server.dialects.ollama.bodies import Asked
from kvloom.server.dialects.ollama.shapes import AnswerWriter, Heading
from kvloom.server.observe.timing import Timing
from tests.support.models.templates import HERMES, QWEN3, R1, TemplateTokenizer
from tests.support.servers import MODEL, FakeServer, fake_server
from tests.support.wire.ollama import GREEDY, HELLO, error, lines, prompt_of, truth, whole

DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


@pytest.fixture(scope="module")
def endless() -> Iterator[FakeServer]:
    """A server whose answers end at their length limit only."""
    with fake_server(has_eos=False) as running:
        yield running


@pytest.fixture(scope="module")
def hermes() -> Iterator[FakeServer]:
    with fake_server(tokenizer=TemplateTokenizer(HERMES), max_seq_len=8192) as running:
        yield running


# -- answers


def test_a_chat_streams_lines_unless_it_says_otherwise(endless: FakeServer):
    found = lines(endless, "/api/chat", {"messages": HELLO, "options": GREEDY})
    assert "".join(line["message"]["content"] for line in found) == truth(prompt_of(("user", "hello")), 12)
    assert {line["message"]["role"] for line in found} == {"assistant"}
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    assert "done_reason" not in found[0]
    last = found[-1]
    assert (last["done_reason"], last["eval_count"], last["model"]) == ("length", 12, MODEL)
    assert last["prompt_eval_count"] == len(prompt_of(("user", "hello")))
    assert all(isinstance(last[name], int) for name in DURATIONS)
    assert last["total_duration"] >= last["prompt_eval_duration"] + last["eval_duration"] > 0
    assert last["created_at"].endswith("Z")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", {"messages": HELLO}),
        ("/api/chat", {"messages": [{"role": "system", "content": "Be brief."}, *HELLO], "logprobs": True}),
        ("/api/generate", {"prompt": "hello", "logprobs": True, "top_logprobs": 2}),
        ("/api/generate", {"prompt": "hello", "raw": True}),
    ],
)
def test_a_whole_answer_is_its_lines_in_one(endless: FakeServer, path: str, body: dict[str, Any]):
    body = {**body, "options": GREEDY}
    answer = whole(endless, path, body)
    found = lines(endless, path, body)
    text = [line["message"]["content"] if path.endswith("chat") else line["response"] for line in found]
    assert (answer["message"]["content"] if path.endswith("chat") else answer["response"]) == "".join(text)
    assert answer.get("logprobs", []) == [value for line in found for value in line.get("logprobs", [])]
    assert len(answer.get("logprobs", [])) == (12 if "logprobs" in body else 0)
    assert answer.get("context") == found[-1].get("context")
    for name in ("done", "done_reason", "eval_count", "prompt_eval_count"):
        assert answer[name] == found[-1][name]


def test_log_probabilities_have_their_bytes_and_the_likeliest(endless: FakeServer):
    answer = whole(endless, "/api/chat", {"messages": HELLO, "options": GREEDY, "logprobs": True, "top_logprobs": 3})
    first = answer["logprobs"][0]
    assert set(first) == {"token", "logprob", "bytes", "top_logprobs"}
    assert first["token"] == answer["message"]["content"][0]
    assert len(first["top_logprobs"]) == 3


def test_a_prompt_goes_through_the_chat_template_and_a_raw_one_does_not(endless: FakeServer):
    fields = {"prompt": "hello", "options": GREEDY}
    assert whole(endless, "/api/generate", fields)["response"] == truth(prompt_of(("user", "hello")), 12)
    with_system = whole(endless, "/api/generate", {**fields, "system": "Be brief."})
    assert with_system["response"] == truth(prompt_of(("system", "Be brief."), ("user", "hello")), 12)
    raw = whole(endless, "/api/generate", {**fields, "raw": True})
    assert raw["response"] == truth("hello", 12)
    assert "context" not in raw


def test_context_carries_a_conversation_on(endless: FakeServer):
    first = whole(endless, "/api/generate", {"prompt": "one", "options": GREEDY})
    begun = prompt_of(("user", "one")) + first["response"]
    assert bytes(first["context"]).decode() == begun
    second = whole(endless, "/api/generate", {"prompt": "two", "context": first["context"], "options": GREEDY})
    assert second["response"] == truth(begun + prompt_of(("user", "two")), 12)


def test_a_last_message_of_the_assistant_is_gone_on_with(endless: FakeServer):
    said = [*HELLO, {"role": "assistant", "content": "Once upon"}]
    answer = whole(endless, "/api/chat", {"messages": said, "options": GREEDY})
    assert answer["message"]["content"] == truth(prompt_of(("user", "hello")) + "Once upon", 12)


# -- options


def test_options_are_honoured(endless: FakeServer):
    text = truth(prompt_of(("user", "hello")), 12)
    for stop in (text[3:5], [text[3:5], "never"]):
        answer = whole(endless, "/api/chat", {"messages": HELLO, "options": {**GREEDY, "stop": stop}})
        assert (answer["message"]["content"], answer["done_reason"]) == (text[: text.index(text[3:5])], "stop")
    drawn = {"messages": HELLO, "options": {"temperature": 1.5, "top_k": 0, "top_p": 1, "num_predict": 20.0, "seed": 7}}
    assert whole(endless, "/api/chat", drawn)["message"] == whole(endless, "/api/chat", drawn)["message"]
    other = {"messages": HELLO, "options": {**drawn["options"], "seed": 8}}
    assert whole(endless, "/api/chat", other)["message"] != whole(endless, "/api/chat", drawn)["message"]


def test_options_that_are_hints_change_nothing(endless: FakeServer):
    hints = {"num_gpu": 99, "num_thread": 3, "num_batch": 7, "use_mmap": False, "num_keep": 4, "numa": True, "a": {}}
    plain = whole(endless, "/api/chat", {"messages": HELLO, "options": GREEDY})
    hinted = whole(endless, "/api/chat", {"messages": HELLO, "options": {**GREEDY, **hints}, "keep_alive": "5m"})
    assert hinted["message"] == plain["message"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"mirostat": 1}, "options.mirostat: is not supported"),
        ({"tfs_z": 0.5}, "options.tfs_z: is not supported"),
        ({"penalize_newline": False}, "options.penalize_newline: is not supported"),
        ({"repeat_last_n": 64, "repeat_penalty": 1.1}, "options.repeat_last_n: must be -1"),
        ({"num_ctx": 1}, "options.num_ctx: must be at least 2, got 1"),
        ({"num_ctx": 10}, "options.num_ctx: is 10, but the prompt has 23 tokens"),
        ({"top_p": 0}, "options.top_p: must be above 0"),
        ({"top_k": 1.5}, "options.top_k: must be a whole number, got 1.5"),
        ({"num_predict": 2**40}, "options.num_predict: must be between"),
        ({"temperature": -1}, "options.temperature: expected `float` >= 0.0"),
        ({"stop": ["a"] * 17}, "options.stop: takes up to 16 texts, got 17"),
        ({"seed": 2**70}, "options.seed"),
    ],
)
def test_options_that_cannot_be_had_are_refused_by_name(server: FakeServer, options: dict[str, Any], problem: str):
    for path, said in (("/api/chat", {"messages": HELLO}), ("/api/generate", {"prompt": "hello"})):
        assert error(server, path, {**said, "options": options}).startswith(problem)


def test_a_window_of_penalties_matters_only_with_penalties(endless: FakeServer):
    plain = whole(endless, "/api/chat", {"messages": HELLO, "options": GREEDY})["message"]
    for more in ({"repeat_last_n": 64}, {"repeat_last_n": 0, "repeat_penalty": 50}):
        assert whole(endless, "/api/chat", {"messages": HELLO, "options": {**GREEDY, **more}})["message"] == plain
    whole(endless, "/api/chat", {"messages": HELLO, "options": {**GREEDY, "repeat_last_n": -1, "repeat_penalty": 1.5}})


def test_num_ctx_bounds_prompt_and_answer(endless: FakeServer):
    length = len(prompt_of(("user", "hello")))
    answer = whole(endless, "/api/chat", {"messages": HELLO, "options": {"num_ctx": length + 5, "num_predict": -1}})
    assert (answer["eval_count"], answer["done_reason"]) == (5, "length")
    larger = {"num_ctx": 10**6, "num_predict": 3}
    assert whole(endless, "/api/chat", {"messages": HELLO, "options": larger})["eval_count"] == 3


def test_a_chat_that_is_too_long_loses_its_oldest_messages(endless: FakeServer):
    old = [{"role": "user" if i % 2 == 0 else "assistant", "content": f"message {i} " * 5} for i in range(8)]
    said = [{"role": "system", "content": "Be brief."}, *old, *HELLO]
    options = {**GREEDY, "num_ctx": 300}
    answer = whole(endless, "/api/chat", {"messages": said, "options": options})
    for first in range(9):
        prompt = prompt_of(*((m["role"], m["content"]) for m in [said[0], *said[1 + first :]]))
        if len(prompt) <= 300 - 12:
            break
    assert 0 < first < 8
    assert (answer["prompt_eval_count"], answer["message"]["content"]) == (len(prompt), truth(prompt, 12))
    refused = error(endless, "/api/chat", {"messages": said, "options": options, "truncate": False})
    assert refused.startswith("options.num_ctx: is 300, but the prompt has")
    huge = error(endless, "/api/chat", {"messages": [*old, {"role": "user", "content": "x" * 5000}]})
    assert huge.startswith("This model's maximum context length is")


# -- format, tools, thinking


def test_format_is_json_or_a_schema(hermes: FakeServer):
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}, "name": {"enum": ["Ada", "Eva"]}},
        "required": ["age", "name"],
        "additionalProperties": False,
    }
    for path, said in (("/api/chat", {"messages": HELLO}), ("/api/generate", {"prompt": "hello"})):
        answer = whole(hermes, path, {**said, "format": schema, "options": {"num_predict": 100}})
        text = answer["message"]["content"] if "message" in answer else answer["response"]
        validate(schema, json.loads(text))
        answer = whole(hermes, path, {**said, "format": "json", "options": {"num_predict": 20}})
        assert (answer["message"]["content"] if "message" in answer else answer["response"]).startswith("{")
        assert error(hermes, path, {**said, "format": "yaml"}).startswith('format: must be "json" or a JSON schema')


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALLS = '<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>'


def test_tools_are_called_with_objects_and_answered(hermes: FakeServer):
    tokenizer = TemplateTokenizer(HERMES)
    call = {"function": {"name": "weather", "arguments": {"city": "Bonn"}}}
    result = {"role": "tool", "tool_name": "weather", "content": "rain"}
    said = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}, result]
    whole(hermes, "/api/chat", {"messages": said, "tools": [TOOL], "options": GREEDY})
    assert f"{CALLS}\ntool: rain" in tokenizer.rendered[-1]
    assert '"description": "Of a city."' in tokenizer.rendered[-1]
    other = {"model": MODEL, "messages": HELLO, "tools": [{**TOOL, "type": "other"}], "options": GREEDY}
    assert hermes.post("/api/chat", other).headers["x-warning"].startswith("tools[0] is left out: 'other'")


class Said:
    """Stands for a ChatOutput: returns these events, one list for each delta."""

    def __init__(self, *steps: list[ChatEvent]) -> None:
        self._steps = list(steps)

    def add(self, delta: Delta) -> list[ChatEvent]:
        return self._steps.pop(0)


def test_calls_are_told_whole_one_by_one(monkeypatch: pytest.MonkeyPatch):
    """Tests the writer alone, because a fake model writes no tool calls by itself."""
    monkeypatch.setattr(shapes, "new_id", lambda: "0123456789")
    arguments = '{"city": "Bonn"}'
    output: Any = Said(
        [ToolCallStart(0, "weather"), ToolCallArguments(0, arguments[:5])],
        [ToolCallArguments(0, arguments[5:]), ToolCallStart(1, "time"), ToolCallArguments(1, "{}")],
        [ToolCallStart(2, "cut"), ToolCallArguments(2, '{"a')],
    )
    service: Any = SimpleNamespace(tokenizer=ByteTokenizer())
    writer = AnswerWriter(Heading("chat", MODEL), service, Asked((1, 2, 3), SamplingParams(), output), Timing())
    assert writer.add(0, Delta("", token_ids=(1,))) == b""
    line = json.loads(writer.add(0, Delta("", token_ids=(2,))))
    call = {"id": "call_01234567", "function": {"index": 0, "name": "weather", "arguments": {"city": "Bonn"}}}
    assert line["message"] == {"role": "assistant", "content": "", "tool_calls": [call]}
    line, last = map(json.loads, writer.add(0, Delta("", finish_reason=FinishReason.LENGTH)).splitlines())
    assert [found["function"]["name"] for found in line["message"]["tool_calls"]] == ["time"]
    body = json.loads(writer.whole().body)
    assert [found["function"]["index"] for found in body["message"]["tool_calls"]] == [0, 1]
    assert body["done_reason"] == last["done_reason"] == "length"


def test_thinking_comes_apart():
    with fake_server(tokenizer=TemplateTokenizer(R1), has_eos=False) as server:
        found = lines(server, "/api/chat", {"messages": HELLO, "think": True, "options": GREEDY})
        assert "".join(line["message"].get("thinking", "") for line in found)
        assert {line["message"]["content"] for line in found} == {""}
        answer = whole(server, "/api/generate", {"prompt": "hello", "options": GREEDY})
        assert (bool(answer["thinking"]), answer["response"]) == (True, "")
        assert "thinking" in server.post("/api/show", {"model": MODEL}).json()["capabilities"]
        begun = [*HELLO, {"role": "assistant", "content": "So"}]
        assert "while the model thinks" in error(server, "/api/chat", {"messages": begun})


@pytest.mark.parametrize(("think", "has_block"), [(False, True), (True, False), ("high", False), (None, False)])
def test_think_is_told_to_the_template(think: Any, has_block: bool):
    with fake_server(tokenizer=TemplateTokenizer(QWEN3)) as server:
        whole(server, "/api/chat", {"messages": HELLO, "think": think, "options": GREEDY})
        assert TemplateTokenizer.rendered[-1].endswith("</think>\n\n") == has_block


def test_a_model_that_does_not_think_says_so(server: FakeServer):
    assert error(server, "/api/chat", {"messages": HELLO, "think": True}) == "think: 'mock' does not support thinking"
    whole(server, "/api/chat", {"messages": HELLO, "think": False, "options": GREEDY})
