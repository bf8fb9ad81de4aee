"""Sequences whose prompts begin alike: each block is computed once, however many of them come at once."""

import logging
from dataclasses import replace

import pytest

from kvloom.contract.config import Limits
from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.schedule.blocks import BlockPool, extend_chain
from kvloom.engine.schedule.commit import apply_step, check, commit_step
from kvloom.engine.schedule.scheduler import Circumstances, plan_step
from kvloom.engine.schedule.seq import Plan, Seq
from tests.engine.schedule.test_scheduler import BLOCK, counts, make_seq, run_step, sampling_ids
from tests.engine.test_engine import prompt, truth
from tests.support.engine.engines import fake_engine, run_all, tokens_of

LIMITS = Limits(8, 20, BLOCK)


def steps_of(seqs: list[Seq], pool: BlockPool, limits: Limits, count: int) -> list[dict[int, int]]:
    return [counts(run_step(seqs, pool, limits)) for _ in range(count)]


def test_of_equal_prompts_one_is_computed_and_the_others_find_it():
    seqs = [make_seq(id, 13) for id in range(4)]
    steps = steps_of(seqs, BlockPool(64), LIMITS, 2)
    assert steps == [{0: 13}, {0: 1, 1: 1, 2: 1, 3: 1}]
    assert [seq.num_cached for seq in seqs] == [0, 12, 12, 12]
    assert len({tuple(seq.block_table[:3]) for seq in seqs}) == 1


def test_a_long_prompt_is_waited_for_until_it_is_found_whole():
    seqs = [make_seq(0, 45), make_seq(1, 45)]
    assert steps_of(seqs, BlockPool(64), LIMITS, 4) == [{0: 20}, {0: 20}, {0: 5}, {0: 1, 1: 1}]


def test_prompts_that_part_are_waited_for_up_to_there():
    seqs = [make_seq(0, 30), Seq(1, [*range(8), *range(500, 522)], 30)]
    extend_chain(seqs[1].hashes, seqs[1].token_ids, BLOCK, "")
    assert steps_of(seqs, BlockPool(64), LIMITS, 2) == [{0: 20}, {0: 10, 1: 10}]


def test_others_go_on_meanwhile():
    seqs = [make_seq(0, 9), make_seq(1, 9), make_seq(2, 9, first=100), make_seq(3, 2)]
    assert steps_of(seqs, BlockPool(64), LIMITS, 1) == [{0: 9, 2: 9, 3: 2}]


def test_whoever_must_compute_all_of_its_prompt_waits_for_nobody():
    seqs = [make_seq(0, 9), make_seq(1, 9, may_reuse=False), make_seq(2, 9, salt="other")]
    assert steps_of(seqs, BlockPool(64), Limits(8, 40, BLOCK), 1) == [{0: 9, 1: 9, 2: 9}]


def test_a_step_under_way_is_waited_for_though_nothing_follows_it():
    """The first sequence ends with the token under way, so the step behind has nothing of it."""
    pool, seqs = BlockPool(64), [make_seq(0, 9, max_len=10), make_seq(1, 9, max_len=10)]
    first = plan_step(seqs, pool, LIMITS)
    apply_step(first, pool)
    assert plan_step(seqs, pool, LIMITS) == Plan()
    commit_step(first, {id: [7] for id in sampling_ids(first)}, pool, BLOCK)
    check(seqs, pool, BLOCK)
    assert counts(plan_step(seqs[1:], pool, LIMITS)) == {1: 1}


@pytest.mark.parametrize(
    "limits", [replace(LIMITS, is_continuous=False), replace(LIMITS, is_selecting=True)], ids=["static", "selecting"]
)
def test_where_a_sequence_that_waits_may_wait_for_long_each_computes_its_own(limits):
    seqs = [make_seq(0, 9), make_seq(1, 9)]
    assert steps_of(seqs, BlockPool(64), limits, 1) == [{0: 9, 1: 9}]


def test_without_a_prefix_cache_each_computes_its_own():
    seqs = [make_seq(0, 9), make_seq(1, 9)]
    assert steps_of(seqs, BlockPool(64, is_caching=False), LIMITS, 1) == [{0: 9, 1: 9}]


def test_a_sequence_that_computes_alone_waits_for_nobody():
    pool, seqs = BlockPool(64), [make_seq(0, 45), make_seq(1, 45)]
    run_step(seqs, pool, replace(LIMITS, max_tokens=18))  # the fifth block is half computed, and stays so
    assert counts(plan_step(seqs, pool, LIMITS, Circumstances(alone=seqs[1]))) == {1: 20}


def test_answers_to_one_prompt_are_those_of_each_alone_and_its_blocks_are_computed_once():
    engine = fake_engine()
    requests = [
        Request(f"r{seed}", prompt(9), SamplingParams(seed=seed, ignore_eos=True, max_tokens=12)) for seed in range(5)
    ]
    found = run_all(engine, *requests)
    assert [tokens_of(found[request.id]) for request in requests] == [truth(request, 12) for request in requests]
    assert engine.stats().total_cached_tokens == 4 * 8


def test_the_log_says_for_what_a_request_waits(caplog):
    engine = fake_engine()
    for name in "ab":
        engine.add(Request(name, prompt(9), SamplingParams(max_tokens=2)))
    with caplog.at_level(logging.DEBUG, "kvloom.engine.verbose"):
        engine.step()
    assert (
        caplog.messages[-1] == "b waits, and 0 behind it: the next part of its prompt is computed for another request"
    )
