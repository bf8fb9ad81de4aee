"""Tokens that a grammar forces: which they are, that they are drafted, and that no draft changes an answer."""

import json
from concurrent.futures import Future

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.contract.config import EngineConfig
from kvloom.contract.request import FinishReason, Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.schedule.guessing import FORCED, Guesser
from kvloom.engine.schedule.lookup import PromptLookup
from kvloom.engine.schedule.profit import Base, pays_to_wait
from kvloom.rank.fake import VOCAB_SIZE, ByteTokenizer, FakeRunner
from kvloom.rank.grammar import guides
from kvloom.rank.grammar.guides import Guides
from kvloom.server.chat.grammars import choice_grammar, json_grammar, regex_grammar
from tests.engine.test_engine import prompt
from tests.support.engine.engines import engine_over, fake_engine, run_all, text_of, tokens_of
from tests.support.engine.grammars import make_guide

FIELDS = {f"lighthouse_{name}": {"enum": ["red", "green"]} for name in ("keeper", "colour", "height")}
SCHEMA = {"type": "object", "properties": FIELDS, "required": list(FIELDS), "additionalProperties": False}
OBJECT = json_grammar(SCHEMA, "schema", is_strict=True)
GRAMMARS = {
    "schema": OBJECT,
    "regex": regex_grammar("ab[cd]efg([0-9]h){3}|abz", "regex"),
    "choice": choice_grammar(["yes, of course", "yes, but later", "no"], "choice"),
    "loose": json_grammar({"type": "object"}, "schema"),
}


@pytest.fixture(autouse=True)
def slow_machine(monkeypatch):
    """No mask of these tests counts as one that takes long."""
    monkeypatch.setattr(guides, "_SOON_S", 100.0)


# -- which tokens are forced


@pytest.mark.parametrize("name", GRAMMARS)
@settings(max_examples=25)
@given(draws=st.lists(st.integers(0, 255), min_size=60, max_size=60), every=st.integers(1, 4))
def test_a_forced_token_is_the_only_one_that_the_mask_allows(name, draws, every):
    """However often it is asked for them."""
    guide = make_guide(GRAMMARS[name])
    for at, draw in enumerate(draws):
        forced = list(guide.forced()) if at % every == 0 else []
        allowed = guide.mask().nonzero()[0].tolist()
        if forced:
            assert allowed == [forced[0]]
        guide.take(allowed[draw % len(allowed)])


def test_the_rest_of_a_name_and_the_text_to_the_next_choice_are_forced():
    guide = make_guide(OBJECT)
    guide.mask()
    assert bytes(guide.forced()) == b'{"lighthouse_keeper": "'
    for byte in b'{"lighthouse_keeper": "r':
        guide.take(byte)
    assert bytes(guide.forced()) == b'ed", "lighthouse_colour": "'


def test_what_is_forced_is_known_again_when_another_token_was_taken():
    guide = make_guide(OBJECT)
    guide.mask()
    guide._forced.extend(b"xy")  # as if the text were cut otherwise
    guide.take(ord("{"))
    assert bytes(guide.forced()) == b'"lighthouse_keeper": "'


def test_a_step_does_not_look_for_forced_tokens_where_a_mask_takes_long():
    guide = make_guide(OBJECT)
    guide.mask()
    guide._mask_s = 1000.0
    assert list(guide.forced()) == []


def test_nothing_is_forced_while_the_grammar_is_read():
    guide = make_guide(OBJECT)
    guide.mask()
    guide._last = Future()
    assert list(guide.forced()) == []


def test_the_end_of_the_reasoning_is_forced_when_its_budget_is_spent():
    params = SamplingParams(reasoning_end="</think>", max_reasoning_tokens=2, grammar=GRAMMARS["choice"])
    guide = Guides(ByteTokenizer, VOCAB_SIZE).guide(params)
    assert guide is not None
    assert not guide.forced()
    guide.take(ord("a"))
    guide.take(ord("b"))
    assert bytes(guide.forced()) == b"</think>"
    for byte in b"</think>":
        guide.take(byte)
    guide.mask()
    guide.take(ord("y"))
    assert bytes(guide.forced()) == b"es, "


# -- a guess begins with them


def test_a_guess_goes_on_behind_forced_tokens_as_the_text_did():
    guesser = Guesser(PromptLookup(2, 8, is_guided=True), 32)
    tokens = [1, 7, 8, 2, 3]
    guesser.follow(tokens, 100, [9, 7])
    assert guesser.guess.tokens == [9, 7, 8, 2, 3]
    assert guesser.guess.kinds[:2] == [FORCED, FORCED]
    assert guesser.guess.chances[1] > 0.9
    before = guesser.guess.chances[2]
    tokens += [9, 7, 8]
    guesser.follow(tokens, 100, [5, 7])
    assert guesser.guess.tokens[:3] == [5, 7, 8]
    assert guesser.guess.chances[2] > before, "what follows forced tokens is learned apart"
    guesser.follow(tokens, 1, [5, 7])
    assert guesser.guess.tokens == [5]
    guesser.follow(tokens, 0, [5, 7])
    assert not guesser.guess.tokens


def test_without_a_grammar_one_token_is_too_little_to_go_on_behind():
    assert PromptLookup(2, 8).propose([1, 7, 8, 2, 3], 9, [7]).tokens == ()


def test_forced_tokens_that_the_sampler_cuts_otherwise_lose_their_credit():
    guesser = Guesser(PromptLookup(2, 8), 32)
    tokens = [1]
    guesser.follow(tokens, 100, [2])
    believed = guesser.guess.chances[0]
    for _ in range(20):
        tokens.append(3)
        guesser.follow(tokens, 100, [2])
    assert guesser.guess.chances[0] < believed / 2


# -- whether steps wait for them


@pytest.mark.parametrize(
    ("shares", "base_s", "gap_s", "waits"),
    [
        ([], 1.0, 0.1, False),
        ([0.0], 1.0, 0.0, False),
        ([0.2], 1.0, 0.1, True),
        ([0.05], 1.0, 0.1, False),
        ([0.2, 0.0], 1.0, 0.05, True),
        ([0.2, 0.0, 0.0, 0.0], 1.0, 0.1, False),
        ([0.2], 0.0, 0.1, False),
    ],
)
def test_steps_wait_for_tokens_that_often_bring_drafts(shares, base_s, gap_s, waits):
    assert pays_to_wait(shares, Base(len(shares), base_s, gap_s)) == waits


def test_a_draft_begins_behind_a_step_before_which_there_was_none():
    """One that is likely wrong counts little."""
    guesser = Guesser(PromptLookup(2, 8), 32)
    guesser.follow([1, 2, 3, 1, 2], 9)
    doubtful = guesser.guess.chances[0]
    guesser.decided(3)
    assert guesser.start_share == pytest.approx(0.1 * doubtful)
    guesser = Guesser(PromptLookup(2, 8), 32)
    guesser.follow([1], 9, [2])
    guesser.decided(0)
    assert guesser.start_share == 0.0
    guesser.decided(3)
    share = guesser.start_share
    assert share > 0
    guesser.decided(3)
    assert guesser.start_share < share


# -- answers


def test_an_object_comes_in_fewer_steps():
    request = Request("a", prompt(9), SamplingParams(temperature=0, max_tokens=150, grammar=OBJECT))
    sizes = EngineConfig(backend="fake", num_blocks=64, block_size=4, max_seq_len=256)
    runners = [FakeRunner(sizes, guides=Guides(ByteTokenizer, VOCAB_SIZE, must_wait=True)) for _ in range(2)]
    plain, engine = engine_over(runners[0]), engine_over(runners[1], num_speculative_tokens=9, run_ahead=False)
    want, got = run_all(plain, request)["a"], run_all(engine, request)["a"]
    assert text_of(got) == text_of(want)
    assert set(json.loads(text_of(got))) == set(FIELDS)
    assert engine.stats().total_steps < plain.stats().total_steps / 3
    assert engine.stats().total_accepted_tokens > 0.9 * engine.stats().total_draft_tokens


@settings(max_examples=30)
@given(
    names=st.lists(st.sampled_from([*GRAMMARS, ""]), min_size=1, max_size=5),
    ends=st.booleans(),
    temperature=st.sampled_from([0, 1]),
    num_blocks=st.integers(66, 120),
    most=st.sampled_from([-1, 1, 5]),
    fields=st.sampled_from([{}, {"logprobs": 2}, {"min_tokens": 5}, {"stop": ("e",)}, {"logit_bias": {101: 5.0}}]),
    config=st.sampled_from([{}, {"run_ahead": False}, {"max_tokens_per_step": 5, "max_batch": 4}]),
)
def test_drafts_change_no_answer_of_a_grammar(names, ends, temperature, num_blocks, most, fields, config):
    mark = {"reasoning_end": "</think>", "max_reasoning_tokens": 9} if ends else {}
    requests = [
        Request(
            f"r{i}",
            prompt(5 + i, 30 * (i % 2)),
            SamplingParams(
                temperature=temperature, seed=i, max_tokens=50, grammar=GRAMMARS.get(name, ""), **mark, **fields
            ),
        )
        for i, name in enumerate(names)
    ]
    found = []
    for count in (0, most):
        engine = fake_engine(num_blocks, max_seq_len=256, num_speculative_tokens=count, **config)
        deltas = run_all(engine, *requests)
        found.append(
            {id: (tokens_of(d), d[-1].finish_reason, [x for y in d for x in y.logprobs]) for id, d in deltas.items()}
        )
    assert found[0] == found[1]
    assert all(reason is not FinishReason.ERROR for _, reason, _ in found[0].values())
