"""When an answer ends, and which text is held back until that is known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.contract.request import FinishReason
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.text.stop import Ends, StopStrings, finish_of

EOS = frozenset({2})


@pytest.mark.parametrize(
    ("token", "num_output", "num_total", "params", "expected"),
    [
        (5, 1, 10, SamplingParams(), None),
        (2, 1, 10, SamplingParams(), FinishReason.EOS),
        (2, 1, 10, SamplingParams(ignore_eos=True), None),
        (2, 1, 10, SamplingParams(min_tokens=2), None),
        (2, 2, 10, SamplingParams(min_tokens=2), FinishReason.EOS),
        (7, 1, 10, SamplingParams(stop_token_ids=(7, 8)), FinishReason.STOP),
        (7, 1, 10, SamplingParams(stop_token_ids=(7,), min_tokens=3), None),
        (2, 1, 10, SamplingParams(ignore_eos=True, stop_token_ids=(2,)), FinishReason.STOP),
        (5, 4, 10, SamplingParams(max_tokens=4), FinishReason.LENGTH),
        (5, 4, 10, SamplingParams(max_tokens=5), None),
        (2, 4, 10, SamplingParams(max_tokens=4), FinishReason.EOS),
        (5, 4, 20, SamplingParams(), FinishReason.LENGTH),
    ],
)
def test_a_sequence_ends_by_eos_stop_token_or_length(token, num_output, num_total, params, expected):
    assert finish_of(token, num_total - num_output, num_output, params, Ends(EOS, 20)) is expected


def feed(stops: StopStrings, pieces: list[str]) -> str:
    text = ""
    for piece in pieces:
        text += stops.add(piece)
        if stops.matched is not None:
            return text
    return text + stops.finish()


def test_text_that_may_begin_a_stop_string_is_held_back():
    stops = StopStrings(["</s>"])
    assert stops.add("Hi <") == "Hi "
    assert stops.add("/") == ""
    assert stops.add("b>") == "</b>"
    assert stops.matched is None


def test_the_stop_string_is_left_out_unless_asked_for():
    assert feed(StopStrings(["END"]), ["so E", "N", "D more"]) == "so "
    assert feed(StopStrings(["END"], is_included=True), ["so E", "N", "D more"]) == "so END"


@pytest.mark.parametrize(
    ("stops", "text", "matched"),
    [(["cd", "bc", "b"], "a", "b"), (["bc", "c"], "a", "bc"), (["abcde", "d"], "abc", "d")],
)
def test_the_first_stop_string_to_be_complete_wins_and_of_those_the_longest(stops, text, matched):
    found = StopStrings(stops)
    assert feed(found, ["abcd"]) == text
    assert found.matched == matched


def test_what_was_held_back_comes_out_at_the_end():
    assert feed(StopStrings(["END"]), ["the E", "N"]) == "the EN"


def test_no_stop_string_ends_in_the_first_pieces_of_an_answer_with_a_minimum_length():
    """As with vLLM: one that begins in them and ends behind them does end the answer."""
    assert feed(StopStrings(["b"], num_exempt=2), ["ab", "b", "a", "bc"]) == "abba"
    assert feed(StopStrings(["bc"], num_exempt=2), ["bc", "ab", "ca"]) == "bca"
    assert feed(StopStrings(["ab", "xabz"], num_exempt=1), ["xab", "q", "ab"]) == "xabq"


def test_without_stop_strings_text_passes():
    assert feed(StopStrings([]), ["a", "b"]) == "ab"


texts = st.text(alphabet="ab<", max_size=12)


@given(
    st.lists(texts, max_size=6), st.lists(st.text(alphabet="ab<", min_size=1, max_size=4), max_size=3), st.booleans()
)
def test_pieces_give_the_same_as_the_whole(pieces, stops, is_included):
    whole = "".join(pieces)
    ends = [(whole.find(stop) + len(stop), whole.find(stop)) for stop in stops if stop in whole]
    in_pieces = StopStrings(stops, is_included)
    text = feed(in_pieces, pieces)
    if ends:
        end, start = min(ends)
        assert text == whole[: end if is_included else start]
        assert in_pieces.matched == whole[start:end]
    else:
        assert text == whole
        assert in_pieces.matched is None
