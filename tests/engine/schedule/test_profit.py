"""Profit: how likely guesses are, how many of them pay, and that nothing is looked up where none can."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.schedule.cost import StepCost
from kvloom.engine.schedule.guessing import Bar, Guesser
from kvloom.engine.schedule.lookup import PromptLookup
from kvloom.engine.schedule.pace import Pace
from kvloom.engine.schedule.profit import Base, Bid, Turnaround, draft_lengths
from tests.engine.test_engine import prompt
from tests.support.engine.engines import fake_engine, run_all

GREEDY = SamplingParams(temperature=0, max_tokens=25, ignore_eos=True)


# -- how likely they are


def test_a_token_is_as_likely_as_guesses_like_it_were_right_and_all_before_it():
    guesser = Guesser(PromptLookup(2, 8), 32)
    tokens = [1, 2, *range(3, 12), 1, 2]
    guesser.follow(tokens, 100)
    before = guesser.guess.chances
    assert before == sorted(before, reverse=True)
    assert len(before) == len(guesser.guess.tokens) == 11
    for token in (3, 4, 5):
        tokens.append(token)
        guesser.follow(tokens, 100)
    assert guesser.guess.chances[0] > before[0]
    tokens.append(99)
    guesser.follow(tokens, 100)
    assert not guesser.guess.tokens
    tokens += [1, 2]
    guesser.follow(tokens, 100)
    assert guesser.guess.tokens[0] == 3
    assert guesser.guess.kinds[0] == 2
    assert (
        guesser.guess.chances[0] > before[0]
    )  # the guess behind as few tokens was right; the wrong one came behind more
    tokens += [98, 1, 2]
    guesser.follow(tokens, 100)
    assert guesser.guess.chances[0] < (before[0] * 2 * 0.9 + 1) / (2 * 0.9 + 1)


def test_a_guess_is_as_long_as_is_asked_for():
    guesser = Guesser(PromptLookup(1, 1), 3)
    guesser.follow([1, 2, 3, 4, 5, 1], 100)
    assert guesser.guess.tokens == [2, 3, 4]
    guesser.follow([1, 2, 3, 4, 5, 1], 2)
    assert guesser.guess.tokens == [2, 3]


def test_a_guess_is_one_token_longer_than_it_pays_and_that_one_is_learned_from():
    guesser = Guesser(PromptLookup(2, 8), 32)
    tokens = [1, 2, *range(3, 12), 1, 2]
    guesser.follow(tokens, 100)
    whole = guesser.guess.chances
    guesser.follow(tokens, 100, bar=Bar(whole[2]))
    assert guesser.guess.chances == whole[:3]
    guesser.follow(tokens, 100, bar=Bar(0.9))
    assert guesser.guess.tokens == [3]
    before = guesser.guess.chances
    guesser.follow([*tokens, 3, 98, 1, 2], 100, bar=Bar(0.9))
    assert guesser.guess.chances > before


def test_few_tokens_that_agree_are_looked_up_where_they_pay_and_in_turn():
    guesser = Guesser(PromptLookup(2, 8), 32)
    tokens = [1, 2, 3, 4, 5, 1, 2]
    guesser.follow(tokens, 100, bar=Bar(0.5, False))
    assert not guesser.guess.tokens
    guesser.follow(tokens, 100, bar=Bar(0.4, False))
    assert guesser.guess.tokens[0] == 3
    guesser.follow(tokens, 100, bar=Bar(0.5, True))
    assert guesser.guess.tokens == [3]
    guesser.follow([*tokens, 3], 100, bar=Bar(0.5, False))
    assert guesser.guess.tokens[0] == 4, "it has learned that they pay"
    many = [1, 2, 3, 4, 5, 1, 2, 3, 4]
    other = Guesser(PromptLookup(2, 8), 32)
    other.follow(many, 100, bar=Bar(0.5, False))
    assert other.guess.tokens[0] == 5


# -- how many pay


@pytest.mark.parametrize(
    ("chances", "num_seqs", "gap_s", "lengths"),
    [
        ([[0.9, 0.8, 0.05]], 1, 0.0, [2]),  # a row takes a tenth of the step
        ([[0.09, 0.05]], 1, 0.0, [0]),
        ([[]], 1, 0.0, [0]),
        ([[0.9] * 40], 1, 0.0, [40]),
        ([[0.15]], 1, 0.1, [0]),  # what is lost by not running ahead is more than it brings
        ([[0.15]], 1, 0.0, [1]),
        ([[0.9, 0.5], [0.95, 0.2]], 2, 0.0, [2, 1]),
        ([[0.9, 0.8], []], 10, 0.0, [0, 0]),  # ten sequences bring as much with each tenth of a step
        ([[0.9] * 40, []], 2, 0.0, [19, 0]),  # the other one does not wait for longer than three steps
    ],
)
def test_rows_are_added_while_they_bring_more_than_the_step(chances, num_seqs, gap_s, lengths):
    assert draft_lengths([Bid(own, 0.1) for own in chances], Base(num_seqs, 1.0, gap_s)) == lengths


def speed(bids: list[Bid], lengths: list[int], num_seqs: int, gap_s: float) -> float:
    """Tokens a second of steps that take one second without drafts."""
    right = sum(sum(bid.chances[:length]) for bid, length in zip(bids, lengths, strict=True))
    rows_s = sum(bid.row_s * length for bid, length in zip(bids, lengths, strict=True))
    return (num_seqs + right) / (1 + rows_s + gap_s * any(lengths))


@given(
    st.lists(st.lists(st.floats(0, 1), max_size=4).map(lambda own: sorted(own, reverse=True)), min_size=1, max_size=2),
    st.floats(0.001, 0.4),
    st.floats(0, 0.5),
)
def test_no_other_lengths_are_faster(chances, row_s, gap_s):
    bids, num_seqs = [Bid(own, row_s) for own in chances], len(chances)
    best = speed(bids, draft_lengths(bids, Base(num_seqs, 1.0, gap_s)), num_seqs, gap_s)
    for lengths in itertools.product(*(range(len(own) + 1) for own in chances)):
        if num_seqs == 1 or sum(lengths) * row_s <= 2:
            assert speed(bids, list(lengths), num_seqs, gap_s) <= best * (1 + 1e-9)


@given(
    st.lists(st.lists(st.floats(0, 1), max_size=4).map(lambda own: sorted(own, reverse=True)), min_size=1, max_size=5),
    st.floats(0.001, 0.4),
    st.floats(0, 5),
    st.integers(0, 3),
)
def test_tokens_that_are_less_likely_than_the_least_are_never_drafted(chances, row_s, gap_s, num_others):
    base = Base(len(chances) + num_others, 1.0, gap_s)
    least = base.least_chance(row_s, 4)
    lengths = draft_lengths([Bid(own, row_s) for own in chances], base)
    assert lengths == draft_lengths([Bid([c for c in own if c > least], row_s) for own in chances], base)
    if least >= 1:
        assert not any(lengths)


@pytest.mark.parametrize(("gap_s", "is_looked_up"), [(0.1, True), (3.3, False)])
def test_nothing_is_looked_up_where_no_guess_can_pay(gap_s, is_looked_up, monkeypatch):
    """A row takes 0.9 s and a step a second: 32 right tokens save 3.2 s."""
    assert (Base(1, 1.0, gap_s).least_chance(0.9, 32) < 1) == is_looked_up
    looked: list[int] = []
    monkeypatch.setattr(Guesser, "follow", lambda self, token_ids, *_: looked.append(len(token_ids)))
    monkeypatch.setattr(Pace, "base", lambda self, seqs, _: Base(1, 1.0, gap_s))
    monkeypatch.setattr(StepCost, "least_row_s", 0.9)
    engine = fake_engine(num_speculative_tokens=-1)
    run_all(engine, Request("a", prompt(9), GREEDY))
    assert bool(looked) == is_looked_up
    assert engine.stats().total_steps_ahead > 20


def test_sequences_learn_in_turn_what_seldom_pays(monkeypatch):
    learning: list[bool] = []
    monkeypatch.setattr(Pace, "base", lambda self, seqs, _: Base(len(seqs), 1.0, 0.0))
    monkeypatch.setattr(Guesser, "follow", lambda self, *given: learning.append(given[-1].is_learning))
    engine = fake_engine(num_speculative_tokens=-1)
    run_all(engine, *(Request(f"r{i}", prompt(9, 30 * i), GREEDY) for i in range(3)))
    steps = [learning[i : i + 3] for i in range(0, 60, 3)]
    assert all(sum(step) == 1 for step in steps)
    assert all(before.index(True) == (step.index(True) - 1) % 3 for before, step in itertools.pairwise(steps))


def test_what_a_rank_waits_for_is_learned_where_nothing_runs_ahead():
    turn = Turnaround()
    for now_s in (0.0, 10.0, 20.0):  # a step takes the rank 6 s, and its messages 1 s
        turn.sent(now_s, is_alone=True)
        turn.ended(now_s + 7.0, 6.0, waits=True)
    assert turn.seconds == 4.0
    turn.sent(30.0, is_alone=False)
    turn.ended(31.0, 0.1, waits=True)
    assert turn.seconds == 4.0
    turn.ended(31.0, 0.1, waits=False)
    turn.sent(1000.0, is_alone=True)  # nobody asked for anything
    turn.ended(1001.0, 1.0, waits=False)
    assert turn.seconds == 4.0
