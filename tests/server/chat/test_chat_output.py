"""Splitting an answer into reasoning, text and tool calls, from the engine's deltas."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.contract.request import Delta, FinishReason
from kvloom.server.chat.events import ChatEvent, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart
from kvloom.server.chat.form import KNOWN
from kvloom.server.chat.output import ChatOutput
from kvloom.server.chat.reasoning import ReasoningSplitter
from kvloom.server.chat.tool_calls import make_parser


def split(is_open: bool, *pieces: str) -> tuple[str, str]:
    """The reasoning and the text of an answer."""
    splitter = ReasoningSplitter(is_open)
    events: list[ChatEvent] = []
    for piece in pieces:
        events += splitter.add(piece)
    events += splitter.finish()
    thoughts = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    return thoughts, "".join(event.text for event in events if isinstance(event, TextDelta))


@pytest.mark.parametrize(
    ("is_open", "text", "found"),
    [
        (False, "<think>\nhm, so\n</think>\n\nYes. ", ("hm, so", "Yes. ")),
        (True, "hm\n</think>\nYes", ("hm", "Yes")),
        (True, "it goes on", ("it goes on", "")),
        (True, "cut at </thi", ("cut at </thi", "")),
        (False, " plain", ("", " plain")),
        (False, " <thin", ("", " <thin")),
        (False, "a <think>b</think>", ("", "a <think>b</think>")),
        (False, "<think></think>Yes</think>", ("", "Yes</think>")),
        (True, "</think>", ("", "")),
    ],
)
def test_reasoning_is_split_out(is_open: bool, text: str, found: tuple[str, str]):
    assert split(is_open, text) == found
    assert split(is_open, *text) == found


@given(
    st.booleans(), st.lists(st.sampled_from(["<think>", "</think>", "<", "/", "think>", " ", "\n", "a"]), max_size=12)
)
def test_pieces_make_no_difference(is_open: bool, pieces: list[str]):
    text = "".join(pieces)
    assert split(is_open, *pieces) == split(is_open, text) == split(is_open, *text)


def delta(text: str, is_last: bool = False) -> Delta:
    return Delta("r", text, (1,) * bool(text), finish_reason=FinishReason.EOS if is_last else None)


def test_reasoning_then_text_then_calls():
    output = ChatOutput(ReasoningSplitter(False), make_parser(KNOWN["hermes"], {}))
    texts = [
        "<think>",
        "I call",
        "</think>",
        "\n",
        "Now:",
        '\n<tool_call>{"name": "f",',
        ' "arguments": {}}</tool_call>',
    ]
    events = [event for text in texts for event in output.add(delta(text))] + output.add(delta("", is_last=True))
    assert events == [
        ReasoningDelta("I call"),
        TextDelta("Now:"),
        ToolCallStart(0, "f"),
        ToolCallArguments(0, "{}"),
    ]
    assert (output.num_reasoning_tokens, output.num_calls) == (3, 1)


def test_calls_over_the_number_allowed_are_left_out():
    output = ChatOutput(None, make_parser(KNOWN["llama3"], {"f": {}}), max_calls=1)
    call = '{"name": "f", "parameters": {}}'
    assert output.add(delta(f"{call};{call}", is_last=True)) == [ToolCallStart(0, "f"), ToolCallArguments(0, "{}")]
    assert output.num_calls == 1


def test_without_a_form_all_is_text():
    assert ChatOutput().add(delta("<think>a", is_last=True)) == [TextDelta("<think>a")]
