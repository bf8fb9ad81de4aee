"""Reasoning in the engine: free until its end, which comes within the budget; the answer follows the grammar."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.contract.request import FinishReason, Request
from kvloom.contract.sampling import SamplingParams
from kvloom.rank.fake import EOS_ID, VOCAB_SIZE, ByteTokenizer
from kvloom.rank.grammar.guides import Guides
from kvloom.rank.grammar.reasoning import EndMark, ReasoningGuide
from kvloom.server.chat.grammars import regex_grammar
from tests.support.engine.engines import fake_engine, run_all, text_of, tokens_of

END = "</think>"
PROMPT = tuple(b"hi")
DIGITS = regex_grammar("[0-9]{5}", "r")


def run(speculation: int = 0, **params: object) -> tuple[str, int, FinishReason | None]:
    """The answer's text, number of tokens and finish reason."""
    engine = fake_engine(max_seq_len=512, num_blocks=256, num_speculative_tokens=speculation)
    sampling = SamplingParams(reasoning_end=END, **params)
    deltas = run_all(engine, Request("r", PROMPT, sampling))["r"]
    return text_of(deltas), len(tokens_of(deltas)), deltas[-1].finish_reason


@pytest.mark.parametrize("speculation", [0, 4])
@pytest.mark.parametrize("budget", [0, 1, 20])
def test_the_end_is_forced_when_the_budget_is_spent(budget: int, speculation: int):
    text, _, _ = run(speculation, max_reasoning_tokens=budget, seed=11, max_tokens=60, ignore_eos=True)
    assert text.replace("\ufffd", "").find(END) == budget


@pytest.mark.parametrize("budget", [0, 7])
def test_the_grammar_begins_after_the_end(budget: int):
    for seed in range(8):
        text, _, finish = run(max_reasoning_tokens=budget, seed=seed, grammar=DIGITS, max_tokens=60)
        assert finish is FinishReason.EOS, "the answer's end does not come before its grammar's"
        assert re.fullmatch(END + "[0-9]{5}", text[budget:]), text


def test_without_a_budget_or_a_grammar_nothing_is_changed():
    plain = run_all(fake_engine(), Request("r", PROMPT, SamplingParams(seed=3, max_tokens=30)))["r"]
    assert run(seed=3, max_tokens=30)[0] == text_of(plain)


def guide(grammar: str = "", budget: int | None = None) -> ReasoningGuide:
    params = SamplingParams(reasoning_end=END, max_reasoning_tokens=budget, grammar=grammar)
    found = Guides(ByteTokenizer, VOCAB_SIZE).guide(params)
    assert isinstance(found, ReasoningGuide)
    return found


def test_reasoning_that_the_model_ends_by_itself():
    thinking = guide(DIGITS, 100)
    for byte in b"so </think>":
        mask = thinking.mask()
        assert mask is not None
        assert mask[byte]
        assert not mask[EOS_ID]
        thinking.take(byte)
    mask = thinking.mask()
    assert mask is not None
    assert bytes(mask.nonzero()[0].tolist()) == b"0123456789"


def test_it_is_free_only_as_long_as_no_mask_can_come():
    assert guide().is_free(1000)
    assert not guide(DIGITS).is_free(0)
    limited = guide(budget=5)
    assert [limited.is_free(more) for more in (0, 4, 5)] == [True, True, False]
    limited.take(97)
    assert [limited.is_free(more) for more in (3, 4)] == [True, False]


def test_a_token_may_not_go_on_behind_the_mark_before_a_grammar():
    tokens = [b"a", b"</think", b">", b">x", b"</think>", b"</think>\n", b"<", b"<eos>"]
    mark = EndMark(END, [4], tokens, [7], 10)
    thinking = ReasoningGuide(mark, guide(DIGITS), None)
    mask = thinking.mask()
    assert mask is not None
    assert mask.nonzero()[0].tolist() == [0, 1, 2, 3, 4, 6]
    thinking.take(1)
    mask = thinking.mask()
    assert mask is not None
    assert mask.nonzero()[0].tolist() == [0, 1, 2, 4, 5, 6]


@given(st.lists(st.sampled_from([*b"ab</think>"]), max_size=40), st.integers(0, 20))
def test_the_mark_comes_once_and_in_time(wanted: list[int], budget: int):
    """The model would write `wanted`, and then x without end."""
    thinking = guide(budget=budget)
    text = b""
    for byte in [*wanted, *b"x" * 40]:
        mask = thinking.mask()
        token = byte if mask is None else int(np.flatnonzero(mask)[0])
        thinking.take(token)
        text += bytes([token])
    assert 0 <= text.find(END.encode()) <= budget
