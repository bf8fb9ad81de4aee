"""Drafts of a model whose layers keep states: after a wrong one a sequence goes back to the state before the step.

The fake model's state is a checksum of all tokens, and one of other tokens ends the test.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.contract.config import Limits
from kvloom.contract.messages import Batch, Work
from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.schedule.again import Again
from kvloom.engine.schedule.blocks import BlockPool
from kvloom.engine.schedule.commit import apply_step, check, commit_step, release_seq
from kvloom.engine.schedule.profit import Base, Bid, draft_lengths
from kvloom.engine.schedule.scheduler import plan_step
from kvloom.engine.schedule.seq import Seq, Status
from kvloom.engine.schedule.snapshots import Snapshots
from tests.engine.test_engine import prompt, truth
from tests.support.engine.drafts import draft_always
from tests.support.engine.engines import run_all, tokens_of
from tests.support.engine.stateful import stateful_engine


def drafting(most: int, draft: list[int]) -> tuple[Seq, BlockPool, Limits]:
    """A sequence that decodes, with `most` states for running sequences."""
    seq, pool, limits = (
        Seq(0, [1, 2, 3], 3),
        BlockPool(9, True, 0, Snapshots(most, 2, 4)),
        Limits(most, 20, 4, max_draft_tokens=9),
    )
    plan = plan_step([seq], pool, limits)
    apply_step(plan, pool)
    commit_step(plan, {0: [7]}, pool, 4)
    seq.draft = draft
    return seq, pool, limits


def test_drafts_are_computed_in_a_copy_and_a_wrong_one_costs_its_step_again():
    seq, pool, limits = drafting(2, [8, 9])
    (before,) = seq.states
    plan = plan_step([seq], pool, limits)
    (work,) = apply_step(plan, pool)
    assert (work.begun, work.draft) == (before, [8, 9])
    assert work.state not in (before, -1)
    commit_step(plan, {0: [8, 5]}, pool, 4)
    check([seq], pool, 4)
    assert (seq.token_ids, seq.num_computed, seq.states) == ([1, 2, 3, 7, 8, 5], 3, [before])
    plan = plan_step([seq], pool, limits)
    (work,) = apply_step(plan, pool)
    assert (work.start, work.num_tokens, work.state, work.begun) == (3, 3, before, -1)
    commit_step(plan, {0: [6]}, pool, 4)
    plan = plan_step([seq], pool, limits)
    assert apply_step(plan, pool)[0].state == -1, "told once"
    check([seq], pool, 4)


def test_drafts_that_are_right_leave_the_copy():
    seq, pool, limits = drafting(2, [8, 9])
    plan = plan_step([seq], pool, limits)
    (work,) = apply_step(plan, pool)
    commit_step(plan, {0: [8, 9, 5]}, pool, 4)
    check([seq], pool, 4)
    assert (seq.num_computed, seq.states) == (6, [work.state])


def test_without_a_state_to_spare_nothing_is_drafted():
    seq, pool, limits = drafting(1, [8, 9])
    (step,) = plan_step([seq], pool, limits).steps
    assert step.draft == ()


def test_a_request_that_is_dropped_in_such_a_step_leaves_nothing():
    seq, pool, limits = drafting(2, [8])
    apply_step(plan_step([seq], pool, limits), pool)
    release_seq(seq, pool, Status.FINISHED)
    check([], pool, 4)


def test_a_step_in_another_place_is_not_sent_as_a_further_one_of_the_same():
    again = Again(True)
    for work, is_again in (
        (Work(0, 3, 1, 1, []), False),
        (Work(0, 4, 1, 1, []), True),
        (Work(0, 5, 1, 1, [], state=1), False),
    ):
        batch = Batch([], [work], [])
        again.shorten(batch)
        assert batch.again == is_again


def test_what_is_computed_again_is_a_part_of_the_price():
    chances = [0.6, 0.5, 0.4]
    assert draft_lengths([Bid(chances, 0.1)], Base(1, 1.0, 0.0)) == [3]
    assert draft_lengths([Bid([0.16, 0.1], 0.1)], Base(1, 1.0, 0.0)) == [1]
    assert draft_lengths([Bid([0.16, 0.1], 0.1, goes_back=True)], Base(1, 1.0, 0.0)) == [0]
    first, second = Bid([0.5, 0.25], 0.1, goes_back=True).rates()
    assert first == pytest.approx((0.5 / 0.15, 0.15))
    assert second == pytest.approx((0.25 / 0.15, 0.15))


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    num_states=st.integers(1, 5),
    num_snapshots=st.integers(0, 4),
    max_tokens=st.integers(4, 40),
    every=st.integers(2, 9),
    num_blocks=st.integers(12, 40),
    run_ahead=st.booleans(),
)
def test_answers_are_those_without_drafts(lengths, num_states, num_snapshots, max_tokens, every, num_blocks, run_ahead):
    with pytest.MonkeyPatch.context() as patch:
        draft_always(patch)
        engine = stateful_engine(
            num_blocks, max_seq_len=40, num_states=num_states, num_snapshots=num_snapshots, max_batch=4,
            max_tokens_per_step=max_tokens, num_speculative_tokens=3, run_ahead=run_ahead,
        )  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        asked = []
        for i, length in enumerate(lengths):
            request = Request(f"r{i}", prompt(length, i % 2), params)
            told = [token ^ (n % every == every - 1) for n, token in enumerate(truth(request, 16))]
            asked.append(Request(request.id, request.prompt_ids, params, prediction=tuple(told)))
        found = run_all(engine, *asked)
    for request in asked:
        assert tokens_of(found[request.id]) == truth(request, 16)
    engine.check()
