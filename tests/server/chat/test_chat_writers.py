"""Chat answers written for /v1/responses and /v1/messages: reasoning, text and tool calls."""

import itertools
import json
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from kvloom.contract.request import Delta, FinishReason, TokenLogprob
from kvloom.rank.fake import ByteTokenizer
from kvloom.server.chat.events import ChatEvent, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart
from kvloom.server.dialects.anthropic import shapes as anthropic
from kvloom.server.dialects.anthropic.shapes import MessageWriter, Told
from kvloom.server.dialects.openai.shapes import chat_logprobs
from kvloom.server.dialects.responses import calls
from kvloom.server.dialects.responses import shapes as responses
from kvloom.server.dialects.responses.shapes import ResponseWriter
from kvloom.server.dialects.responses.tools import Tools

ANSWER: list[ChatEvent] = [
    ReasoningDelta("It "),
    ReasoningDelta("rains."),
    TextDelta("Let me "),
    TextDelta("look."),
    ToolCallStart(0, "weather"),
    ToolCallArguments(0, '{"city": '),
    ToolCallArguments(0, '"Ulm"}'),
    ToolCallStart(1, "time"),
    ToolCallArguments(1, "{}"),
]
CUT = ANSWER[:6]


@pytest.fixture(autouse=True)
def numbered_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count()
    for module in (anthropic, responses, calls):
        monkeypatch.setattr(module, "new_id", lambda: str(next(numbers)))


class Said:
    """Stands for a ChatOutput: returns these events, one list for each delta."""

    num_reasoning_tokens = 2

    def __init__(self, steps: Iterable[list[ChatEvent]]) -> None:
        self._steps = iter(steps)

    def add(self, delta: Delta) -> list[ChatEvent]:
        return next(self._steps, [])


def events_of(frames: bytes) -> list[dict[str, Any]]:
    return [json.loads(block.split("data: ")[1]) for block in frames.decode().split("\n\n") if block]


def deltas(count: int, reason: FinishReason, stop: str | None = None) -> list[Delta]:
    tokens = [Delta("", token_ids=(1,), num_cached_tokens=4)] * count
    return [*tokens, Delta("", finish_reason=reason, stop_reason=stop, num_cached_tokens=4)]


def message(answer: list[ChatEvent], reason: FinishReason, stop: str | None = None) -> tuple[Any, list[dict[str, Any]]]:
    output: Any = Said([event] for event in answer)
    writer = MessageWriter("msg_1", "m", Told(10), output)
    frames = [writer.add(0, delta) for delta in deltas(len(answer), reason, stop)]
    return writer.message, events_of(b"".join(frames) + writer.end())


def response_writer(steps: Iterable[list[ChatEvent]]) -> ResponseWriter:
    service, output = SimpleNamespace(tokenizer=ByteTokenizer()), Said(steps)
    told = {"id": "resp_1", "status": "in_progress", "output": []}
    return ResponseWriter(told, service, 10, output, Tools())


def response(answer: list[ChatEvent], reason: FinishReason) -> tuple[Any, list[dict[str, Any]]]:
    writer = response_writer([event] for event in answer)
    frames = [writer.add(0, delta) for delta in deltas(len(answer), reason)]
    return writer.response, events_of(b"".join(frames) + writer.end())


def test_a_message_has_a_block_for_each_part():
    found, events = message(ANSWER, FinishReason.EOS)
    assert found["content"] == [
        {"type": "thinking", "thinking": "It rains.", "signature": ""},
        {"type": "text", "text": "Let me look."},
        {"type": "tool_use", "id": "toolu_0", "name": "weather", "input": {"city": "Ulm"}},
        {"type": "tool_use", "id": "toolu_1", "name": "time", "input": {}},
    ]
    assert found["stop_reason"] == "tool_use"
    assert [(event["type"], event["index"]) for event in events if "index" in event] == [
        *(
            ("content_block_start", 0),
            ("content_block_delta", 0),
            ("content_block_delta", 0),
            ("content_block_stop", 0),
        ),
        *(
            ("content_block_start", 1),
            ("content_block_delta", 1),
            ("content_block_delta", 1),
            ("content_block_stop", 1),
        ),
        *(
            ("content_block_start", 2),
            ("content_block_delta", 2),
            ("content_block_delta", 2),
            ("content_block_stop", 2),
        ),
        *(("content_block_start", 3), ("content_block_delta", 3), ("content_block_stop", 3)),
    ]
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert starts[0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert starts[2] == {"type": "tool_use", "id": "toolu_0", "name": "weather", "input": {}}
    pieces = [event["delta"].get("partial_json", "") for event in events if event["type"] == "content_block_delta"]
    assert "".join(pieces) == '{"city": "Ulm"}{}'


def test_a_message_whose_call_is_cut_says_so():
    found, events = message(CUT, FinishReason.LENGTH)
    assert found["stop_reason"] == "max_tokens"
    assert found["content"][-1]["input"] == {}, "the cut argument is left out"
    assert [event["type"] for event in events][-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_a_whole_message_has_of_a_cut_call_what_the_client_reads_of_the_stream():
    found, events = message([*CUT, ToolCallArguments(0, '"Ulm", "days": [1, 2')], FinishReason.LENGTH)
    pieces = [event["delta"]["partial_json"] for event in events if "partial_json" in event.get("delta", ())]
    assert "".join(pieces) == '{"city": "Ulm", "days": [1, 2'
    assert found["content"][-1]["input"] == {"city": "Ulm", "days": [1, 2]}


def test_a_stop_sequence_after_a_call_is_what_stopped_it():
    found, _ = message(ANSWER, FinishReason.STOP, "zz")
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "zz")


def test_a_response_has_an_item_for_each_part():
    found, events = response(ANSWER, FinishReason.EOS)
    assert found["status"] == "completed"
    assert found["output"] == [
        {
            "id": "rs_0",
            "type": "reasoning",
            "status": "completed",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "It rains."}],
        },
        {
            "id": "msg_1",
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Let me look.", "annotations": [], "logprobs": []}],
        },
        {
            "id": "fc_2",
            "type": "function_call",
            "status": "completed",
            "call_id": "call_3",
            "name": "weather",
            "arguments": '{"city": "Ulm"}',
        },
        {
            "id": "fc_4",
            "type": "function_call",
            "status": "completed",
            "call_id": "call_5",
            "name": "time",
            "arguments": "{}",
        },
    ]
    assert found["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    part = ["response.output_item.added", "response.content_part.added"]
    end = ["response.content_part.done", "response.output_item.done"]
    call = "response.function_call_arguments"
    assert [event["type"] for event in events] == [
        *("response.created", "response.in_progress"),
        *(*part, *["response.reasoning_text.delta"] * 2, "response.reasoning_text.done", *end),
        *(*part, *["response.output_text.delta"] * 2, "response.output_text.done", *end),
        *("response.output_item.added", f"{call}.delta", f"{call}.delta", f"{call}.done", "response.output_item.done"),
        *("response.output_item.added", f"{call}.delta", f"{call}.done", "response.output_item.done"),
        "response.completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    done = [event for event in events if event["type"] == f"{call}.done"]
    assert [(event["name"], event["arguments"]) for event in done] == [("weather", '{"city": "Ulm"}'), ("time", "{}")]


def test_a_response_whose_call_is_cut_says_so():
    found, events = response(CUT, FinishReason.LENGTH)
    assert [item["status"] for item in found["output"]] == ["completed", "completed", "incomplete"]
    assert events[-1]["type"] == "response.incomplete"


def test_log_probabilities_are_of_the_text_that_they_came_with_or_before():
    tokens = [TokenLogprob(i, -0.5) for i in range(65, 71)]
    steps: list[tuple[list[ChatEvent], list[TokenLogprob]]] = [
        ([ReasoningDelta("hm")], tokens[:1]),
        ([], tokens[1:2]),  # half a character
        ([TextDelta("é")], tokens[2:3]),
        ([TextDelta("a"), TextDelta("b")], tokens[3:5]),
        ([], tokens[5:]),  # the end-of-sequence token
    ]
    writer = response_writer(events for events, _ in steps)
    for _, logprobs in steps:
        writer.add(0, Delta("", logprobs=tuple(logprobs)))
    writer.add(0, Delta("", finish_reason=FinishReason.EOS))
    told = writer.response["output"][1]["content"][0]["logprobs"]
    assert told == chat_logprobs(ByteTokenizer(), tokens[1:])["content"]
