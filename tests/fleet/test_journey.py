"""A request that moves to another replica at any token continues with the tokens of the undisturbed answer."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.contract.request import Delta, FinishReason, Request
from kvloom.contract.sampling import SamplingParams
from kvloom.fleet.journey import MAX_MOVES, Journey, with_seed
from kvloom.rank.fake import fake_answer

PROMPT = (65, 66, 67)


@given(st.lists(st.integers(0, 12), max_size=MAX_MOVES), st.integers(0, 2**32))
def test_an_answer_in_parts_is_the_answer(parts, seed):
    params = SamplingParams(max_tokens=40, seed=seed)
    whole = fake_answer(PROMPT, params, seed, 40)
    journey = Journey(Request("r", PROMPT, params))
    for number, length in enumerate([*parts, 40]):
        journey.arrived(f"replica-{number}", "w8a8")
        asked = journey.next_request()
        rest = fake_answer((*asked.prompt_ids, *asked.answer), asked.params, seed, 40 - len(asked.answer))
        for token in rest[:length]:
            journey.add(Delta("r", token_ids=(token,)))
        assert number == len(parts) or journey.lose()
    assert journey.told == whole


def test_a_request_moves_twice_and_no_more():
    journey = Journey(Request("r", PROMPT))
    assert [journey.lose() for _ in range(3)] == [True, True, False]
    assert journey.num_moves == 3


def test_it_must_not_come_back_to_where_it_was_lost():
    journey = Journey(Request("r", PROMPT))
    journey.arrived("a", "w8a8")
    journey.lose()
    assert journey.lost == ["a"]


def test_only_weights_of_one_form_go_on_with_each_others_tokens():
    journey = Journey(Request("r", PROMPT))
    journey.arrived("a", "w8a8 avx512")
    assert journey.required_layout == ""
    journey.add(Delta("r", token_ids=(1,)))
    assert journey.required_layout == "w8a8 avx512"
    journey.lose()
    assert not journey.arrived("b", "bf16 avx512")
    assert journey.required_layout == "w8a8 avx512"
    journey.lose()
    assert journey.arrived("c", "w8a8 avx512")


def test_what_the_first_replica_found_cached_is_what_the_caller_is_told():
    journey = Journey(Request("r", PROMPT))
    journey.add(Delta("r", token_ids=(1,), num_cached_tokens=2))
    end = journey.add(Delta("r", token_ids=(2,), num_cached_tokens=48, finish_reason=FinishReason.LENGTH))
    assert end.num_cached_tokens == 2


def test_an_answer_that_the_caller_brought_stands_before_what_was_told():
    journey = Journey(Request("r", PROMPT, answer=(9,)))
    journey.add(Delta("r", token_ids=(1, 2)))
    assert journey.next_request().answer == (9, 1, 2)


@pytest.mark.parametrize(("given", "seed"), [(None, 7), (3, 3), (0, 0)])
def test_a_seed_is_drawn_once_where_none_was_given(given, seed):
    request = Request("r", PROMPT, SamplingParams(seed=given))
    assert with_seed(request, lambda: 7).params == replace(request.params, seed=seed)


def test_a_greedy_request_needs_no_seed():
    request = Request("r", PROMPT, SamplingParams(temperature=0))
    assert with_seed(request, lambda: 7) is request
