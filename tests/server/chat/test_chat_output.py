"""Splitting an answer into reasoning, text and tool calls, from the engine's deltas."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.contract.request import Delta, FinishReason
from kvloom.server.chat.channels import ChannelReader
from kvloom.server.chat.events import ChatEvent, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart
from kvloom.server.chat.form import CHANNELS, KNOWN
from kvloom.server.chat.output import ChatOutput
from kvloom.server.chat.reasoning import ReasoningSplitter
from kvloom.server.chat.tool_calls import make_parser

HARMONY = next(row for row in CHANNELS if row.name == "harmony")


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


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<think>Hm <call>x", ("Hm", "<call>x")),
        ("<think>Hm <cal", ("Hm <cal", "")),
        ("<think>Hm</think><call>x", ("Hm", "<call>x")),
        ("<think><call>x</think>", ("", "<call>x</think>")),
    ],
)
def test_a_call_ends_reasoning_whose_end_is_missing(text: str, found: tuple[str, str]):
    for pieces in ([text], list(text)):
        splitter = ReasoningSplitter(False, breaks=("<call>",))
        events = [event for piece in pieces for event in splitter.add(piece)] + splitter.finish()
        thoughts = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
        assert (thoughts, "".join(event.text for event in events if isinstance(event, TextDelta))) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("</think>Yes.", [TextDelta("Yes.")]),
        ("\n</think>\n\n<b>Yes</think>", [TextDelta("<b>Yes</think>")]),
        ("</th", [TextDelta("</th")]),
        ("</the>", [TextDelta("</the>")]),
        ("</think><think>No", [TextDelta("<think>No")]),
    ],
)
def test_an_end_mark_with_which_an_answer_begins_is_no_text(text: str, found: list[TextDelta]):
    for pieces in ([text], list(text)):
        splitter = ReasoningSplitter(False)
        events = [event for piece in pieces for event in splitter.add(piece)] + splitter.finish()
        assert [TextDelta("".join(event.text for event in events if isinstance(event, TextDelta)))] == found


def test_the_analysis_channel_is_counted_as_reasoning():
    output = ChatOutput(None, ChannelReader(HARMONY, {"f": {}}), max_calls=1)
    call = "<|channel|>commentary to=functions.f json<|message|>{}"
    texts = ["<|channel|>analysis<|message|>", "Hm.", "<|end|>", f"<|start|>assistant{call}<|call|>", call]
    events = [event for text in texts for event in output.add(delta(text))] + output.add(delta("", is_last=True))
    assert events == [ReasoningDelta("Hm."), ToolCallStart(0, "f"), ToolCallArguments(0, "{}")]
    assert (output.num_reasoning_tokens, output.num_calls) == (3, 1)


def test_calls_over_the_number_allowed_are_left_out():
    output = ChatOutput(None, make_parser(KNOWN["llama3"], {"f": {}}), max_calls=1)
    call = '{"name": "f", "parameters": {}}'
    assert output.add(delta(f"{call};{call}", is_last=True)) == [ToolCallStart(0, "f"), ToolCallArguments(0, "{}")]
    assert output.num_calls == 1


def test_without_a_form_all_is_text():
    assert ChatOutput().add(delta("<think>a", is_last=True)) == [TextDelta("<think>a")]


@pytest.mark.parametrize(
    ("is_open", "text", "found"),
    [
        (True, "Hm.</thi", [ReasoningDelta("Hm.")]),
        (True, "a <", [ReasoningDelta("a"), ReasoningDelta(" <")]),
        (False, "<thi", []),
        (False, "<", [TextDelta("<")]),
    ],
)
def test_half_a_mark_at_the_end_of_a_cut_answer_is_neither_reasoning_nor_text(
    is_open: bool, text: str, found: list[ChatEvent]
):
    splitter = ReasoningSplitter(is_open)
    assert splitter.add(text) + splitter.finish(is_cut=True) == found
