"""What is known is found to the token: within a block that is full, and within the last one of an answer."""

import random

import pytest

from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.engine import Engine
from kvloom.engine.schedule.known import KnownTokens
from tests.support.engine.crashes import prompt, truth
from tests.support.engine.engines import fake_engine, run_all, tokens_of
from tests.support.engine.windowed import windowed_engine

PARAMS = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)


@pytest.fixture(params=["all tokens", "windows"])
def engine(request: pytest.FixtureRequest) -> Engine:
    if request.param == "windows":
        return windowed_engine(
            num_blocks=64, num_window_blocks=40, reach=9, max_seq_len=200, max_batch=4, max_tokens_per_step=8
        )
    return fake_engine(max_seq_len=200, max_batch=4, max_tokens_per_step=8)


def asked(
    engine: Engine, tokens: list[int] | tuple[int, ...], params: SamplingParams = PARAMS
) -> tuple[list[int], int]:
    """Its answer, which must be the right one, and the prompt's tokens that were found."""
    request = Request("one", tuple(tokens), params)
    deltas = run_all(engine, request)["one"]
    assert tokens_of(deltas) == truth(request, params.max_tokens)
    return tokens_of(deltas), deltas[0].num_cached_tokens


@pytest.mark.parametrize("num_new", [1, 3, 4, 10])
def test_a_conversation_computes_no_token_twice(engine, num_new):
    """But the last one of each answer, which nothing was computed behind, may be."""
    told = [*prompt(13)]
    for turn in range(5):
        num_known = len(told) - num_new
        answer, num_cached = asked(engine, told)
        assert turn == 0 or num_known - 1 <= num_cached <= num_known
        told += [*answer, *prompt(num_new, 50 * turn)]


@pytest.mark.parametrize("num_shared", [1, 5, 11, 12, 18])
def test_prompts_that_part_within_a_block_compute_only_what_differs(engine, num_shared):
    shared = prompt(num_shared)
    for turn in range(4):
        _, num_cached = asked(engine, [*shared, 100 + turn, *prompt(9, 10 * turn)])
        assert num_cached == (num_shared if turn else 0)


def test_a_regenerated_answer_computes_the_last_token_alone(engine):
    asked(engine, prompt(22))
    assert asked(engine, prompt(22))[1] == 21


def test_what_a_request_of_another_salt_left_is_not_found(engine):
    asked(engine, prompt(22))
    (delta, *_) = run_all(engine, Request("other", prompt(22), PARAMS, cache_salt="x"))["other"]
    assert delta.num_cached_tokens == 0


def test_it_finds_the_longest_common_beginning_of_what_was_learned_and_not_forgotten():
    dice = random.Random(5)
    known, oracle = KnownTokens(), {}
    for _ in range(2000):
        block, parent = dice.randrange(12), bytes([dice.randrange(3)])
        tokens = tuple(dice.randrange(2) for _ in range(dice.randint(1, 5)))
        if dice.random() < 0.3:
            known.forget(block)
            oracle.pop(block, None)
        else:
            known.learn(block, parent, tokens)
            oracle[block] = parent, tokens
        wanted = tuple(dice.randrange(2) for _ in range(5))
        common = {
            key: next((i for i, (a, b) in enumerate(zip(wanted, own, strict=False)) if a != b), len(own))
            for key, (behind, own) in oracle.items()
            if behind == parent
        }
        found, count = known.find(parent, wanted)
        assert count == max(common.values(), default=0)
        assert found == -1 if count == 0 else common[found] == count
        assert (block in known) == (block in oracle)


def test_a_copy_that_takes_the_last_block_is_not_made():
    """All blocks are promised to the sequence. It begins behind the full ones, and does not wait for ever."""
    engine = fake_engine(9, max_seq_len=36, max_batch=4, max_tokens_per_step=4, max_preempt=0)
    for length in (9, 17):
        _, num_cached = asked(engine, prompt(length), SamplingParams(temperature=0, max_tokens=36 - length))
    assert num_cached in (8, 9)
