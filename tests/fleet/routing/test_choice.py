"""The choice of a replica for a prompt: prefixes count, the guard bounds the load."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvloom.fleet.routing.choice import Candidate, Guard, Rules, choose, cost

candidates = st.lists(
    st.builds(
        Candidate,
        id=st.uuids().map(str),
        load=st.integers(0, 10_000),
        num_known=st.integers(0, 5_000),
        num_loadable=st.integers(0, 5_000),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda candidate: candidate.id,
)
rules = st.builds(
    Rules,
    guard=st.builds(Guard, factor=st.floats(1, 4), slack_tokens=st.integers(0, 4096)),
    load_cost=st.floats(0, 1),
)
num_tokens = st.integers(5_000, 40_000)


@given(candidates, num_tokens, rules, st.integers(0, 100))
def test_everybody_is_ranked_once(found, tokens, how, turn):
    assert sorted(choose(found, tokens, how, turn)) == sorted(candidate.id for candidate in found)


@given(candidates, num_tokens, rules, st.integers(0, 100))
def test_no_choice_of_two_finds_a_replica_that_has_less_before_it_than_the_guard_allows(found, tokens, how, turn):
    loads = {candidate.id: candidate.load for candidate in found}
    chosen = loads[choose(found, tokens, how, turn)[0]]
    for one, other in itertools.product(loads.values(), repeat=2):
        assert chosen <= how.guard.factor * min(one, other) + how.guard.slack_tokens


@given(candidates, num_tokens, rules)
def test_within_the_guard_the_first_token_comes_soonest(found, tokens, how):
    first = choose(found, tokens, how)[0]
    limit = how.guard.factor * min(candidate.load for candidate in found) + how.guard.slack_tokens
    costs = {candidate.id: cost(candidate, tokens, how) for candidate in found if candidate.load <= limit}
    assert costs[first] == min(costs.values())


@given(candidates, num_tokens, rules, st.integers(1, 5_000))
def test_to_know_more_of_a_prompt_never_loses_it(found, tokens, how, more):
    first = choose(found, tokens, how)[0]
    better = [
        Candidate(c.id, c.load, c.num_known + more, max(0, c.num_loadable - more)) if c.id == first else c
        for c in found
    ]
    if all(c.num_known <= tokens for c in better):
        assert choose(better, tokens, how)[0] == first


def test_the_longest_prefix_wins_among_equally_loaded():
    found = [Candidate("a", 10), Candidate("b", 10, 64), Candidate("c", 10, 32)]
    assert choose(found, 100, Rules()) == ["b", "c", "a"]


def test_a_prefix_is_worth_as_many_tokens_of_load_as_it_has():
    assert choose([Candidate("a", 0), Candidate("b", 63, 64)], 100, Rules())[0] == "b"
    assert choose([Candidate("a", 0), Candidate("b", 65, 64)], 100, Rules())[0] == "a"


def test_what_the_pool_holds_is_cheaper_than_computing_and_dearer_than_holding():
    found = [Candidate("a", 0), Candidate("b", 0, 0, 64), Candidate("c", 0, 64)]
    assert choose(found, 64, Rules()) == ["c", "b", "a"]


def test_a_prefix_behind_too_much_load_is_left():
    found = [Candidate("a", 100), Candidate("b", 5000, 10_000)]
    assert choose(found, 10_000, Rules(Guard(2.0, 1000)))[0] == "a"


def test_equals_take_turns():
    found = [Candidate(id, 0) for id in "abc"]
    assert [choose(found, 10, Rules(), turn)[0] for turn in range(4)] == ["a", "b", "c", "a"]


def test_nobody_is_no_choice():
    assert choose([], 10, Rules()) == []
