"""A chat answer in the words of /v1/responses and of /v1/messages: reasoning, text, calls of tools."""

import itertools
import json
from typing import Any

from kvloom.engine.request import FinishReason
from kvloom.server.api.messages_shapes import MessageWriter
from kvloom.server.api.responses_shapes import ResponseWriter
from kvloom.server.chat_events import ChatEvent, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart

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


def events_of(chunk: bytes) -> list[dict[str, Any]]:
    return [json.loads(block.split("data: ")[1]) for block in chunk.decode().split("\n\n") if block]


def ids() -> Any:
    numbers = itertools.count()
    return lambda: str(next(numbers))


def message(answer: list[ChatEvent], reason: FinishReason, stop: str | None = None) -> tuple[Any, list[dict[str, Any]]]:
    writer = MessageWriter("msg_1", "m", 10, ids())
    chunk = writer.begin()
    for event in answer:
        writer.count(1, 4)
        chunk += writer.add([event])
    return writer.message, events_of(chunk + writer.end(reason, stop))


def response(answer: list[ChatEvent], reason: FinishReason) -> tuple[Any, list[dict[str, Any]]]:
    writer = ResponseWriter({"id": "resp_1", "output": []}, 10, ids())
    chunk = writer.begin()
    for event in answer:
        writer.count(1, 4, 2)
        chunk += writer.add([event])
    return writer.response, events_of(chunk + writer.end(reason))


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
    assert found["content"][-1]["input"] == {}
    assert [event["type"] for event in events][-3:] == ["content_block_stop", "message_delta", "message_stop"]


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
    writer = ResponseWriter({"id": "resp_1", "output": []}, 10, ids())
    entries = [{"token": str(i)} for i in range(6)]
    writer.add([ReasoningDelta("hm")], entries[:1])
    writer.add([], entries[1:2])  # half a character
    writer.add([TextDelta("é")], entries[2:3])
    writer.add([TextDelta("a"), TextDelta("b")], entries[3:5])
    writer.add([], entries[5:])  # the end of sequence
    writer.end(FinishReason.EOS)
    assert writer.response["output"][1]["content"][0]["logprobs"] == entries[1:]
