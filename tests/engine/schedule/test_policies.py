"""Policies and admission rules: what each promises, shown over random loads."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvloom.contract.config import EngineConfig, Limits
from kvloom.contract.errors import BadRequest
from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.schedule.blocks import BlockPool
from kvloom.engine.schedule.commit import apply_step, check, commit_step, release_seq, swap_out
from kvloom.engine.schedule.policies import (
    LEVEL_STEP_S,
    MAX_DEMOTIONS,
    MAX_LEVEL,
    QUANTUM,
    Turns,
    by_level,
    by_state,
    level_of,
    policy_of,
)
from kvloom.engine.schedule.scheduler import FCFS, Circumstances, may_admit, plan_step
from kvloom.engine.schedule.seq import Seq, Status
from tests.engine.schedule.test_scheduler import BLOCK, counts, make_seq, run_step, sampling_ids
from tests.support.engine.engines import fake_engine, run_all, tokens_of

LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=10)
RULES = st.fixed_dictionaries(
    {
        "max_prefill_batch": st.integers(0, 3),
        "max_prefill_tokens": st.integers(0, 7),
        "max_preempt": st.sampled_from([None, 0, 1, 3]),
        "prealloc_blocks": st.integers(0, 10),
        "is_continuous": st.booleans(),
        "is_selecting": st.booleans(),
        "prefill_ms_per_seq": st.integers(0, 3),
        "decode_ms_per_seq": st.integers(0, 3),
        "max_queue_delay_s": st.sampled_from([0.0, 5.0]),
    }
)


def waited(name: int, turn: float, num_output: int = 0) -> Seq:
    seq = Seq(name, [1] * (1 + num_output), 1)
    seq.turn = turn
    return seq


def test_long_answers_wait_behind_newcomers_under_mlfq_alone_and_not_for_ever():
    long, newcomer, late = waited(1, 0.0, QUANTUM * 4), waited(2, 1.0), waited(3, 10 * LEVEL_STEP_S)
    for number in (0, 1):
        key = policy_of(number, number).waiting
        assert key is not None
        assert sorted([late, newcomer, long], key=key) == [long, newcomer, late]
    feedback = policy_of(3, 3).waiting
    assert feedback is not None
    assert sorted([late, newcomer, long], key=feedback) == [newcomer, long, late]


@given(LENGTHS, RULES, st.sampled_from([0, 1, 3]), st.sampled_from([0.0, 10.0]))
def test_every_sequence_ends_and_every_bound_holds_under_any_rules(lengths, rules, number, wait_s):
    pool, limits = BlockPool(8, num_host_blocks=3), Limits(3, 7, BLOCK, **rules)
    seqs = [make_seq(i, length, 100 * i, max_len=length + 8) for i, length in enumerate(lengths)]
    for _ in range(1000):
        if not seqs:
            return
        running = {seq.id for seq in seqs if seq.status is Status.RUNNING}
        plan = plan_step(seqs, pool, limits, Circumstances(policy_of(number, number), wait_s))
        assert plan.steps or plan.preempted, "nobody advances"
        prefills = [s for s in plan.steps if s.seq.id not in running or s.seq.num_pending > 1]
        assert sum(step.num_tokens for step in prefills) <= limits.prefill_tokens
        assert sum(step.num_tokens for step in plan.steps) <= limits.max_tokens
        assert limits.max_preempt is None or len(plan.preempted) <= limits.max_preempt
        admitted = {step.seq.id for step in plan.steps} - running
        assert len(admitted) <= limits.prefill_slots
        assert limits.is_continuous or not (running and admitted), "a static batch was joined"
        swap_out(plan, pool)
        apply_step(plan, pool)
        commit_step(plan, {id: [7] for id in sampling_ids(plan)}, pool, BLOCK)
        check(seqs, pool, BLOCK)
        for seq in [seq for seq in seqs if len(seq.token_ids) >= seq.max_len]:
            seqs.remove(seq)
            release_seq(seq, pool, Status.FINISHED)
    raise AssertionError("a sequence starves")


@given(st.integers(0, 100), st.integers(0, 100_000))
def test_demotion_ends(num_preemptions, num_output):
    seq = Seq(0, [0] * (1 + num_output), 1, num_preemptions=num_preemptions)
    assert 0 <= level_of(seq) <= MAX_LEVEL
    if num_preemptions >= max(MAX_DEMOTIONS, MAX_LEVEL):
        assert by_state(seq)[0] == by_level(seq)[0] == by_level(seq)[1] == 0


def test_state_gives_way_by_those_that_were_preempted_before():
    old, young = Seq(0, [1], 1, num_preemptions=1), Seq(1, [1], 1)
    assert sorted([old, young], key=by_state) == [young, old]
    assert sorted([young, old], key=FCFS.running or policy_of().running) == [old, young]


def test_mlfq_puts_long_answers_after_short_ones():
    long, short = Seq(0, [1] * (1 + QUANTUM), 1), Seq(1, [1], 1)
    assert sorted([long, short], key=by_level) == [short, long]


def test_a_running_prefill_counts_towards_the_prefill_batch():
    pool, limits = BlockPool(32), Limits(4, 8, BLOCK, max_prefill_batch=1)
    seqs = [make_seq(0, 10), make_seq(1, 2, 100)]
    assert [counts(run_step(seqs, pool, limits)) for _ in range(3)] == [{0: 8}, {0: 2}, {0: 1, 1: 2}]


@given(st.integers(1, 5), st.floats(0.1, 1000), st.integers(1, 5), st.floats(0.1, 1000), st.floats(0, 1e6))
def test_a_privilege_is_worth_a_bounded_lead(priority, slo_s, other_priority, other_slo_s, now_s):
    turns = Turns()
    early = turns.turn(now_s, 1, "", priority, slo_s)
    assert early < turns.turn(now_s + turns.max_lead_s + 0.01, 1, "", other_priority, other_slo_s)


def test_priority_and_deadline_bring_a_turn_forward():
    turns = Turns()
    assert turns.turn(0, 1) == 0
    assert turns.turn(0, 1, priority=1) < turns.turn(0, 1, priority=3) == 0 < turns.turn(0, 1, priority=5)
    assert turns.turn(0, 1, slo_s=1) < turns.turn(0, 1, slo_s=2) < 0


@given(st.integers(1, 30), st.integers(1, 100))
@example(3, 10)
def test_a_tenant_with_many_requests_queues_behind_itself(num_requests, num_tokens):
    turns = Turns(token_s=0.1)
    crowd = [turns.turn(0, num_tokens, "crowd") for _ in range(num_requests)]
    assert crowd == sorted(crowd)
    assert turns.turn(0, num_tokens, "one") == crowd[0]
    assert turns.turn(1e6, num_tokens, "crowd") == 1e6  # use long ago no longer counts


@pytest.mark.parametrize(("field", "values"), [("priority", {"priority": 6}), ("slo", {"slo_s": 0})])
def test_turns_refuse_what_they_cannot_order(field, values):
    with pytest.raises(BadRequest, match=field):
        Turns().turn(0, 1, **values)


def test_when_waiting_sequences_may_join():
    running = [Seq(0, [1], 1)]
    select = Limits(4, 8, BLOCK, is_selecting=True, prefill_ms_per_seq=10, decode_ms_per_seq=20)
    assert may_admit(2, running, select, 0)
    assert not may_admit(1, running, select, 0)
    assert may_admit(1, [], select, 0)
    delay = Limits(4, 8, BLOCK, max_queue_delay_s=1.0)
    assert [may_admit(3, running, delay, wait) for wait in (0.5, 1.0)] == [False, True]
    assert may_admit(4, running, delay, 0.5)
    assert not may_admit(9, running, Limits(4, 8, BLOCK, is_continuous=False), 9.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_prefill_batch", 65),
        ("max_preempt", 65),
        ("max_prefill_tokens", -1),
        ("max_queue_delay_s", -1.0),
        ("fair_token_s", -1.0),
        ("prefill_policy", 2),
        ("max_iter_times", 0),
    ],
)
def test_a_configuration_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(BadRequest, match=field):
        EngineConfig(backend="fake", **{field: value})


@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize("max_preempt", [None, 0, 1])
def test_answers_do_not_depend_on_policy_or_memory(number, max_preempt):
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    requests = [Request(f"r{i}", tuple(range(i, i + 9)), params, priority=i % 6) for i in range(12)]
    roomy = run_all(fake_engine(num_blocks=200), *requests)
    rules = {"prefill_policy": number, "decode_policy": number, "max_preempt": max_preempt}
    tight = run_all(fake_engine(num_blocks=16, max_queue_delay_s=0.001, **rules), *requests)
    assert {id: tokens_of(d) for id, d in tight.items()} == {id: tokens_of(d) for id, d in roomy.items()}


def test_no_answer_is_longer_than_max_iter_times():
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (3, 9, None)]
    requests = [Request(str(i), (1, 2), p) for i, p in enumerate(params)]
    found = run_all(fake_engine(max_iter_times=5), *requests)
    assert [len(tokens_of(found[str(i)])) for i in range(3)] == [3, 5, 5]


def test_no_more_are_preempted_in_a_step_than_allowed():
    pool = BlockPool(3)
    blocks = [pool.allocate(1) for _ in range(3)]
    seqs = [
        Seq(i, list(range(5)), 4, status=Status.RUNNING, num_computed=4, block_table=list(blocks[i] or ()))
        for i in range(3)
    ]
    free_for_all = plan_step(seqs, pool, Limits(4, 100, 4))
    assert [seq.id for seq in free_for_all.preempted] == [2, 1]
    at_most_one = plan_step(seqs, pool, Limits(4, 100, 4, max_preempt=1))
    assert [seq.id for seq in at_most_one.preempted] == [2]
    assert [step.seq.id for step in at_most_one.steps] == [0]
