"""Recent texts: what later requests of the same scope are guessed from, and that nobody else's are."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.schedule import recent
from kvloom.engine.schedule.guessing import RECENT, Guesser
from kvloom.engine.schedule.lookup import PromptLookup
from kvloom.engine.schedule.recent import Recent
from tests.engine.test_engine import prompt
from tests.support.engine.engines import fake_engine, run_all, tokens_of

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
EAGER = {"num_speculative_tokens": 9, "run_ahead": False}  # as if rows of the fake model took the time that steps do


def keep(texts: Recent, scope: str, tokens: list[int]) -> None:
    texts.keep(scope, tokens, PromptLookup(2, 4))


# -- which texts there are


def test_what_followed_where_most_tokens_agree_is_found_and_of_equal_ones_the_latest():
    texts = Recent()
    keep(texts, "a", [1, 2, 3, 4, 5, 6])
    keep(texts, "a", [9, 3, 4, 7, 8])
    keep(texts, "a", [8, 3, 4, 6, 5])
    assert texts.find("a", [1, 2, 3, 4], 9) == ([5, 6], 4)
    assert texts.find("a", [3, 4], 9) == ([6, 5], 2)
    assert texts.find("a", [3, 4], 1) == ([6], 2)
    assert texts.find("a", [3, 4], 0) == texts.find("a", [5, 3], 9) == ((), 0)


def test_texts_of_another_scope_are_not_found():
    texts = Recent()
    keep(texts, "a", [1, 2, 3])
    assert texts.find("b", [1, 2], 9) == ((), 0)
    texts.forget()
    assert texts.find("a", [1, 2], 9) == ((), 0)
    assert texts.num_bytes == 0


def test_a_turn_of_a_conversation_replaces_those_before_it():
    texts = Recent()
    keep(texts, "a", [1, 2, 3])
    keep(texts, "b", [1, 2, 3])
    one = texts.num_bytes // 2
    keep(texts, "a", [1, 2, 3])
    assert texts.num_bytes == 2 * one
    keep(texts, "a", [1, 2, 3, 4, 5])
    assert texts.find("a", [2, 3], 9) == ([4, 5], 2)
    assert texts.num_bytes < 4 * one


def test_a_scope_has_so_many_texts(monkeypatch):
    monkeypatch.setattr(recent, "MOST_TEXTS", 2)
    texts = Recent()
    for first in (1, 11, 21):
        keep(texts, "a", [first, first + 1, first + 2])
    assert [len(texts.find("a", [first, first + 1], 9).tokens) for first in (1, 11, 21)] == [0, 1, 1]


def test_the_oldest_text_goes_when_all_take_too_much():
    texts = Recent(max_bytes=600)
    for scope in "abc":
        keep(texts, scope, [1, 2, 3])
    assert [len(texts.find(scope, [1, 2], 9).tokens) for scope in "abc"] == [0, 1, 1]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 3), min_size=1, max_size=20)), max_size=30))
def test_all_texts_together_take_so_many_bytes(given_texts):
    texts = Recent(max_bytes=6000)
    for scope, tokens in given_texts:
        keep(texts, scope, tokens)
        held = [text for _, text in texts._texts.values()]
        assert texts.num_bytes == sum(text.num_bytes for text in held) <= 6000
        assert sorted(n for numbers in texts._of_scope.values() for n in numbers) == list(texts._texts)
        assert all(texts._of_scope.values())


# -- guesses


def test_of_two_guesses_the_one_is_taken_that_is_believed_to_bring_more():
    texts = Recent()
    keep(texts, "a", [1, 2, 3, 4, 5, 6, 7])
    guesser = Guesser(PromptLookup(2, 4), 9, texts, "a")
    guesser.follow([3, 4, 9, 1, 2, 3, 4], 9)
    assert guesser.guess.tokens == [5, 6, 7]
    assert min(guesser.guess.kinds) >= RECENT
    guesser = Guesser(PromptLookup(2, 4), 9, texts, "a")
    guesser.follow([8, 9, 3, 4, 9, 9, 9, 8, 9, 3, 4], 9)
    assert guesser.guess.tokens == [9, 9, 9, 8, 9, 3, 4], "more tokens agree"
    guesser = Guesser(PromptLookup(2, 4), 9, texts, "b")
    guesser.follow([3, 4, 9, 1, 2, 3, 4], 9)
    assert guesser.guess.tokens == [9, 1, 2, 3, 4]


def test_a_sequence_leaves_its_whole_text_however_much_of_it_was_looked_up():
    for num_followed in (0, 3, 5):
        texts = Recent()
        guesser = Guesser(PromptLookup(2, 4), 9, texts, "a")
        if num_followed:
            guesser.follow([1, 2, 3, 4, 5, 6][:num_followed], 9)
        guesser.leave([1, 2, 3, 4, 5, 6])
        assert [texts.find("a", [n, n + 1], 9).tokens for n in (1, 3, 4)] == [[3, 4, 5, 6], [5, 6], [6]]


def test_a_request_without_a_token_leaves_no_text():
    engine = fake_engine(**EAGER)
    engine.add(FIRST)
    engine.abort(FIRST.id)
    assert engine.stats().recent_text_bytes == 0
    engine.add(FIRST)
    engine.step()
    engine.abort(FIRST.id)
    assert engine.stats().recent_text_bytes > 0


def test_short_matches_are_left_out_where_only_long_ones_are_wanted():
    texts = Recent()
    keep(texts, "a", [1, 2, 3, 4, 5, 6])
    assert texts.find("a", [9, 9, 3, 4], 9, only_long=True) == ((), 0)
    assert texts.find("a", [9, 9], 9, [3, 4]) == ([5, 6], 2)
    assert texts.find("a", [1, 2, 3, 4], 9, only_long=True) == ([5, 6], 4)
    texts.keep("b", [1, 2, 3], PromptLookup(1, 2))
    assert texts.find("b", [1, 2], 9, only_long=True) == ((), 0)


# -- answers


def num_drafted(*requests: Request) -> int:
    """Tokens drafted for the last request, behind the others."""
    engine, plain = fake_engine(**EAGER), fake_engine()
    for request in requests:
        before = engine.stats().total_draft_tokens
        got, want = (run_all(each, request)[request.id] for each in (engine, plain))
        assert tokens_of(got) == tokens_of(want)
    return engine.stats().total_draft_tokens - before


FIRST = Request("a", prompt(9), GREEDY, tenant="one")


def test_the_same_answer_again_comes_from_the_first():
    assert num_drafted(FIRST) == 0
    assert num_drafted(FIRST, Request("b", prompt(9), GREEDY, tenant="one")) > 20


@pytest.mark.parametrize("fields", [{"tenant": "two"}, {"tenant": "one", "cache_salt": "s"}])
def test_nobody_is_guessed_from_the_text_of_another(fields):
    """So the time of an answer tells nothing of what others have asked for."""
    other = Request("b", prompt(9), GREEDY, **fields)
    assert num_drafted(FIRST, other) == num_drafted(other) == 0


@pytest.mark.parametrize("forgets", ["reset_prefix_cache", "release_free"])
def test_texts_are_forgotten_with_the_cached_prefixes(forgets):
    engine = fake_engine(**EAGER)
    run_all(engine, FIRST)
    assert engine.stats().recent_text_bytes > 0
    getattr(engine, forgets)()
    assert engine.stats().recent_text_bytes == 0


def test_nothing_is_kept_where_nothing_is_guessed():
    engine = fake_engine()
    run_all(engine, FIRST)
    assert engine.stats().recent_text_bytes == 0


@settings(max_examples=30)
@given(
    rounds=st.lists(
        st.lists(st.tuples(st.integers(4, 20), st.integers(0, 2)), min_size=1, max_size=3), min_size=2, max_size=4
    ),
    temperature=st.sampled_from([0, 1]),
    stop=st.sampled_from([(), ("e",)]),
    num_blocks=st.integers(20, 40),
)
def test_texts_of_others_change_no_answer(rounds, temperature, stop, num_blocks):
    engine, plain = fake_engine(num_blocks, **EAGER, max_batch=3), fake_engine(num_blocks, max_batch=3)
    for requests in rounds:
        asked = [
            Request(
                f"r{i}",
                prompt(n, 30 * seed),
                SamplingParams(temperature=temperature, seed=seed, max_tokens=20, stop=stop),
            )
            for i, (n, seed) in enumerate(requests)
        ]
        got, want = run_all(engine, *asked), run_all(plain, *asked)
        assert {id: tokens_of(d) for id, d in got.items()} == {id: tokens_of(d) for id, d in want.items()}
