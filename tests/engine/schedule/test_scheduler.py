"""plan_step: which sequences compute how many tokens, wait, or are preempted. Lengths only, no tensors."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvloom.contract.config import Limits
from kvloom.contract.errors import BadRequest
from kvloom.contract.messages import Work
from kvloom.engine.schedule.ahead import may_follow, must_wait
from kvloom.engine.schedule.blocks import BlockPool, WindowPool, extend_chain
from kvloom.engine.schedule.commit import (
    apply_step,
    check,
    commit_step,
    is_stale,
    release_seq,
    swap_out,
    swap_out_windows,
)
from kvloom.engine.schedule.prefix import find_prefix
from kvloom.engine.schedule.scheduler import plan_step
from kvloom.engine.schedule.seq import Plan, Seq, Status
from kvloom.engine.schedule.snapshots import Snapshots

BLOCK = 4


def make_seq(id: int, length: int, first: int = 0, **fields: object) -> Seq:
    seq = Seq(id, list(range(first, first + length)), length, **fields)
    extend_chain(seq.hashes, seq.token_ids, BLOCK, seq.salt)
    return seq


def run_step(seqs: list[Seq], pool: BlockPool, limits: Limits) -> Plan:
    """Plans, applies and commits one step in which every sampled token is 7."""
    plan = plan_step(seqs, pool, limits)
    apply_step(plan, pool)
    commit_step(plan, {id: [7] for id in sampling_ids(plan)}, pool, BLOCK)
    check(seqs, pool, BLOCK)
    return plan


def sampling_ids(plan: Plan) -> list[int]:
    """Ids of sequences whose step reaches their last known token."""
    return [s.seq.id for s in plan.steps if s.start + s.num_tokens - len(s.draft) == len(s.seq.token_ids)]


def counts(plan: Plan) -> dict[int, int]:
    return {step.seq.id: step.num_tokens for step in plan.steps}


def test_who_is_preempted_makes_room_by_what_is_still_its_own():
    """Blocks that it gave back behind its window belong to others by now: preempting it frees only the rest."""
    long, others = make_seq(9, 15, first=200), [make_seq(i, 4, first=20 * i) for i in range(5)]
    pool = BlockPool(20, windows=WindowPool(8, 6, BLOCK))
    seqs, limits = [*others, long], Limits(6, 100, BLOCK)
    for present in ([long], seqs):
        plan = plan_step(present, pool, limits)
        apply_step(plan, pool)
        commit_step(plan, {id: [7] for id in sampling_ids(plan)}, pool, BLOCK)
        check(seqs, pool, BLOCK)
    assert (long.num_dropped, pool.windows.num_free) == (2, 1)
    plan = plan_step(seqs, pool, limits)
    assert (counts(plan), [seq.id for seq in plan.preempted]) == ({0: 1, 1: 1, 2: 1, 3: 1}, [9, 4])
    apply_step(plan, pool)
    check(seqs, pool, BLOCK)
    assert (long.num_dropped, pool.windows.num_free) == (0, 0)


def test_a_sequence_has_a_state_from_its_admission_on_until_it_ends_or_is_preempted():
    seqs, limits = [make_seq(0, 7), make_seq(1, 4, first=100)], Limits(2, 20, BLOCK)
    pool = BlockPool(4, False, 0, Snapshots(2))
    works = apply_step(plan := plan_step(seqs, pool, limits), pool)
    assert [work.state for work in works] == [0, 1]
    commit_step(plan, {0: [7], 1: [7]}, pool, BLOCK)
    check(seqs, pool, BLOCK)
    works = apply_step(plan := plan_step(seqs, pool, limits), pool)
    assert [(work.id, work.state) for work in works] == [(0, -1), (1, -1)]
    commit_step(plan, {0: [7], 1: [7]}, pool, BLOCK)
    plan = run_step(seqs, pool, limits)
    assert [seq.id for seq in plan.preempted] == [1]
    assert (seqs[0].states, seqs[1].states, pool.states.num_free) == ([0], [], 1)
    release_seq(seqs[0], pool, Status.FINISHED)
    works = apply_step(plan_step(seqs, pool, limits), pool)
    assert [(work.id, work.start, work.state) for work in works] == [(1, 0, 0)]


def test_nothing_to_do_is_an_empty_plan():
    assert plan_step([], BlockPool(1), Limits(1, 1, BLOCK)) == Plan()


def test_a_long_prompt_is_computed_in_chunks_of_the_budget():
    seqs = [make_seq(0, 20)]
    pool, limits = BlockPool(8), Limits(4, 8, BLOCK)
    assert [counts(run_step(seqs, pool, limits)) for _ in range(4)] == [{0: 8}, {0: 8}, {0: 4}, {0: 1}]


def test_a_prompt_that_is_computed_whole_waits_for_a_step_with_room_for_all_of_it():
    """A prompt longer than any step gets a step of its own. Its blocks are not cached for others."""
    lengths = (5, 4, 2, 11, 3)
    seqs = [make_seq(i, length, 20 * i, is_whole=True, may_reuse=False) for i, length in enumerate(lengths)]
    pool, limits, plans = BlockPool(8), Limits(4, 8, BLOCK), []
    while waiting := [seq for seq in seqs if seq.status is Status.WAITING]:
        plan = run_step(waiting, pool, limits)
        plans.append(counts(plan))
        for step in plan.steps:
            release_seq(step.seq, pool, Status.FINISHED)
    assert plans == [{0: 5}, {1: 4, 2: 2}, {3: 11}, {4: 3}]
    assert (pool.num_cached, pool.num_free) == (0, 8)


def test_decodes_get_their_token_before_older_prefills_take_the_rest():
    old, young = make_seq(0, 40), make_seq(1, 2, first=100)
    pool, limits = BlockPool(32), Limits(4, 8, BLOCK)
    assert counts(run_step([young], pool, limits)) == {1: 2}
    assert counts(run_step([old, young], pool, limits)) == {1: 1, 0: 7}
    assert counts(run_step([old, young], pool, limits)) == {1: 1, 0: 7}


def test_no_more_sequences_run_than_max_batch():
    seqs = [make_seq(i, 2, first=10 * i) for i in range(5)]
    plan = run_step(seqs, BlockPool(32), Limits(3, 100, BLOCK))
    assert counts(plan) == {0: 2, 1: 2, 2: 2}


def test_running_sequences_count_towards_max_batch():
    pool, limits = BlockPool(32), Limits(3, 100, BLOCK)
    seqs = [make_seq(i, 2, first=10 * i) for i in range(5)]
    run_step(seqs[:2], pool, limits)
    assert counts(run_step(seqs, pool, limits)) == {0: 1, 1: 1, 2: 2}
    assert counts(run_step(seqs, pool, limits)) == {0: 1, 1: 1, 2: 1}


def test_a_waiting_sequence_needs_room_for_all_its_tokens_and_is_not_overtaken():
    big, small = make_seq(0, 12), make_seq(1, 2, first=50)
    pool = BlockPool(2)
    assert plan_step([big, small], pool, Limits(4, 4, BLOCK)) == Plan()
    assert counts(plan_step([small, big], pool, Limits(4, 4, BLOCK))) == {1: 2}


def test_a_cached_prefix_is_not_computed_again_but_its_last_token_is():
    pool, limits = BlockPool(16), Limits(4, 100, BLOCK)
    first = make_seq(0, 8)
    run_step([first], pool, limits)
    again, other_salt, wants_all = make_seq(1, 8), make_seq(2, 8, salt="x"), make_seq(3, 8, may_reuse=False)
    plan = run_step([first, again, other_salt, wants_all], pool, limits)
    assert counts(plan) == {0: 1, 1: 1, 2: 8, 3: 8}
    assert again.num_cached == 7
    assert again.block_table[0] == first.block_table[0]
    assert pool.num_holders(first.block_table[0]) == 2


def test_cached_blocks_that_nobody_holds_count_as_taken_when_they_are_reused():
    pool, limits = BlockPool(4), Limits(4, 100, BLOCK)
    first = make_seq(0, 12)
    run_step([first], pool, limits)
    release_seq(first, pool, Status.FINISHED)
    again, other = make_seq(1, 13), make_seq(2, 4, first=90)
    plan = run_step([again, other], pool, limits)
    assert counts(plan) == {1: 1}  # three hits and one new block fill the pool


def test_cached_blocks_are_not_given_to_another_that_is_admitted_in_the_same_step():
    pool, limits = BlockPool(4), Limits(4, 100, BLOCK)
    for seq in (make_seq(0, 8), make_seq(1, 8, first=50)):  # the first one's blocks would be evicted first
        run_step([seq], pool, limits)
        release_seq(seq, pool, Status.FINISHED)
    other, again = make_seq(2, 4, first=90), make_seq(3, 9)
    assert counts(run_step([other, again], pool, limits)) == {2: 4, 3: 1}
    assert not set(other.block_table) & set(again.block_table)


def test_a_sequence_without_a_block_preempts_the_youngest_and_the_oldest_is_never_preempted():
    pool, limits = BlockPool(4), Limits(4, 100, BLOCK)
    seqs = [make_seq(0, 4), make_seq(1, 4, first=20), make_seq(2, 4, first=40)]
    assert counts(run_step(seqs, pool, limits)) == {0: 4, 1: 4, 2: 4}
    plan = plan_step(seqs, pool, limits)  # one block is free, three are needed
    assert [seq.id for seq in plan.preempted] == [2]
    assert counts(plan) == {0: 1, 1: 1}
    work = apply_step(plan, pool)
    assert seqs[2].status is Status.WAITING
    assert seqs[2].num_preemptions == 1
    assert work[0] == Work(0, 4, 1, 1, [3])
    commit_step(plan, {0: [7], 1: [7]}, pool, BLOCK)
    check(seqs, pool, BLOCK)


def test_the_youngest_preempts_itself_when_no_block_is_left():
    pool, limits = BlockPool(2), Limits(4, 100, BLOCK)
    seqs = [make_seq(0, 4), make_seq(1, 4, first=20)]
    run_step(seqs, pool, limits)
    seqs[0].token_ids.pop()
    seqs[0].token_ids.pop()
    seqs[0].num_computed = 2  # the older one's next token fits its last block, so only the younger needs a block
    plan = plan_step(seqs, pool, limits)
    assert [seq.id for seq in plan.preempted] == [1]
    assert counts(plan) == {0: 1}


def test_the_oldest_waits_rather_than_preempt_itself():
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.retain(blocks)
    seqs = [make_seq(id, 9, status=Status.RUNNING, num_computed=8, block_table=list(blocks)) for id in range(2)]
    plan = plan_step(seqs, pool, Limits(4, 100, BLOCK))  # they share every block, so preempting one of them frees none
    assert [seq.id for seq in plan.preempted] == [1]
    assert plan.steps == ()


def test_nobody_is_admitted_in_a_step_that_preempts():
    pool, limits = BlockPool(2), Limits(4, 100, BLOCK)
    seqs = [make_seq(0, 4), make_seq(1, 4, first=20)]
    run_step(seqs, pool, limits)
    late = make_seq(2, 1, first=60)
    plan = plan_step([*seqs, late], pool, limits)
    assert 2 not in counts(plan)


def test_a_preempted_sequence_resumes_with_its_answer_as_part_of_the_prompt():
    pool, limits = BlockPool(8), Limits(4, 100, BLOCK)
    seq = make_seq(0, 6)
    for _ in range(3):
        run_step([seq], pool, limits)
    pool_before = pool.num_free
    release_seq(seq, pool, Status.WAITING)
    seq.num_preemptions = 1
    assert pool.num_free > pool_before
    plan = run_step([seq], pool, limits)
    assert plan.steps[0].start == 8  # two full blocks were still cached
    assert len(seq.token_ids) == 10
    assert seq.num_cached == 0  # num_cached was set at the first admission, as the caller sees it


def test_a_sequence_that_ended_while_its_step_ran_stays_as_it_is():
    pool, limits = BlockPool(8), Limits(4, 100, BLOCK)
    seq = make_seq(0, 6)
    plan = plan_step([seq], pool, limits)
    apply_step(plan, pool)
    release_seq(seq, pool, Status.FINISHED)
    commit_step(plan, {0: [7]}, pool, BLOCK)
    assert seq.token_ids == list(range(6))
    assert pool.num_cached == 0
    pool.check()


@pytest.mark.parametrize(("max_batch", "max_tokens"), [(0, 1), (4, 3)])
def test_limits_refuse_a_budget_that_cannot_hold_the_batch(max_batch, max_tokens):
    with pytest.raises(BadRequest, match="must be at least"):
        Limits(max_batch, max_tokens, BLOCK)


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, drafts, steps and aborts over a pool that is far too small."""

    LIMITS = Limits(max_batch=3, max_tokens=7, block_size=BLOCK, max_draft_tokens=5)
    NUM_BLOCKS = 8
    MAX_LENGTH = NUM_BLOCKS * BLOCK
    REACH = 0  # RankInfo's reach, in tokens
    NUM_STATES = 0  # RankInfo's

    def __init__(self) -> None:
        super().__init__()
        num_host_blocks = 0 if self.NUM_STATES else 5
        windows = WindowPool(6, self.REACH, BLOCK) if self.REACH else None
        states = Snapshots(self.NUM_STATES)
        self.pool = BlockPool(self.NUM_BLOCKS, not self.NUM_STATES, num_host_blocks, states, windows)
        self.seqs: list[Seq] = []
        self.next_id = 0
        self.under_way: list[Plan] = []  # oldest first

    @rule(length=st.integers(1, 20), first=st.sampled_from([0, 100]))
    def arrive(self, length: int, first: int) -> None:
        self.seqs.append(make_seq(self.next_id, length, first, max_len=self.MAX_LENGTH))
        self.next_id += 1

    @precondition(lambda self: not self.under_way or (len(self.under_way) < 3 and may_follow(self.under_way[-1])))
    @rule()
    def begin(self) -> None:
        plan = plan_step(self.seqs, self.pool, self.LIMITS)
        if self.under_way and must_wait(plan):
            return
        self.judge(plan)
        self.judge_guesses(plan)
        copies = swap_out(plan, self.pool)
        assert len(copies) == sum(len(seq.block_table) for seq in plan.swapped)
        assert len(swap_out_windows(plan)) == sum(len(seq.held_windows) for seq in plan.swapped)
        works = apply_step(plan, self.pool)
        for work, step in zip(works, plan.steps, strict=True):
            assert work.blocks == step.seq.block_table[work.first_block :]
            assert work.windows == (step.seq.window_table[work.first_block :] if self.REACH else [])
            assert (work.start + work.num_tokens + BLOCK - 1) // BLOCK == len(step.seq.block_table)
        self.under_way.append(plan)

    @precondition(lambda self: self.under_way)
    @rule(token=st.integers(0, 3), num_right=st.integers(0, 5), is_late=st.booleans())
    def end(self, token: int, num_right: int, is_late: bool) -> None:
        """Ends the oldest step. `is_late`: the first sequence that was to get a token gets none."""
        plan = self.under_way.pop(0)
        is_late = is_late and not self.NUM_STATES
        drafts = {step.seq.id: step.draft for step in plan.steps}
        sampled = {id: [*drafts[id][:num_right], token] for id in sampling_ids(plan)[is_late:]}
        lengths = {seq.id: len(seq.token_ids) for seq in self.seqs}
        for step in plan.steps:
            first = max(0, step.start + 1 - self.REACH) // BLOCK
            assert is_stale(step) or step.seq.num_dropped <= first, "it reads what it has given back"
        commit_step(plan, sampled, self.pool, BLOCK)
        for seq in list(self.seqs):
            assert len(seq.token_ids) == lengths[seq.id] + len(sampled.get(seq.id, ()))
            if len(seq.token_ids) >= self.MAX_LENGTH:
                self.finish(seq)

    @precondition(lambda self: self.seqs and not self.under_way)
    @rule(data=st.data(), draft=st.lists(st.integers(0, 3), max_size=6))
    def guess(self, data: st.DataObject, draft: list[int]) -> None:
        seq = data.draw(st.sampled_from(self.seqs))
        seq.may_run_ahead = False
        seq.draft = [] if self.NUM_STATES else draft[: max(0, self.MAX_LENGTH - len(seq.token_ids) - 1)]

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.finish(data.draw(st.sampled_from(self.seqs)))

    def finish(self, seq: Seq) -> None:
        self.seqs.remove(seq)
        release_seq(seq, self.pool, Status.FINISHED)

    def judge(self, plan: Plan) -> None:
        running = [seq for seq in self.seqs if seq.status is Status.RUNNING]
        assert sum(step.num_tokens for step in plan.steps) <= self.LIMITS.max_tokens
        assert all(step.num_tokens >= 1 for step in plan.steps)
        assert len(running) - len(plan.preempted) + sum(bool(s.seq not in running) for s in plan.steps) <= 3
        assert not running or running[0] not in plan.preempted
        assert not {s.seq.id for s in plan.steps} & {seq.id for seq in plan.preempted}
        assert [seq.id for seq in plan.preempted] == [seq.id for seq in reversed(running)][: len(plan.preempted)]
        admitted = [step.seq for step in plan.steps if step.seq not in running]
        waiting = [seq for seq in self.seqs if seq.status is Status.WAITING]
        last = waiting.index(admitted[-1]) if admitted else 0
        passed = [seq for seq in waiting[:last] if seq not in admitted]
        assert all(self.lacks_what_is_computed(seq, plan) for seq in passed), "a waiting sequence was overtaken"
        assert [seq for seq in waiting if seq in admitted] == admitted
        assert not self.seqs or plan.steps or plan.preempted, "nobody advances"
        for step in plan.steps:
            assert step.start + step.num_tokens <= self.MAX_LENGTH
            assert step.seq not in running or step.start == step.seq.num_computed + step.seq.num_computing

    def lacks_what_is_computed(self, seq: Seq, plan: Plan) -> bool:
        """Whether the first block that it does not find is computed by this plan, or by one under way."""
        steps = [step for each in (*self.under_way, plan) for step in each.steps if not is_stale(step) or each is plan]
        computed = {
            key
            for step in steps
            for key in step.seq.hashes[step.start // BLOCK : (step.start + step.num_tokens + BLOCK - 1) // BLOCK]
        }
        num_found = len(find_prefix(seq, self.pool, BLOCK).hits)
        return num_found < len(seq.hashes) and seq.hashes[num_found] in computed

    def judge_guesses(self, plan: Plan) -> None:
        """Checks that drafts are prefixes of those proposed, and that all else is planned as without drafts."""
        assert sum(len(step.draft) for step in plan.steps) <= self.LIMITS.max_draft_tokens
        assert all(list(step.draft) == step.seq.draft[: len(step.draft)] for step in plan.steps)
        assert all(step.start + 1 == len(step.seq.token_ids) for step in plan.steps if step.draft), "a prefill guesses"
        drafts = {seq.id: seq.draft for seq in self.seqs}
        for seq in self.seqs:
            seq.draft = []
        bare = plan_step(self.seqs, self.pool, self.LIMITS)
        for seq in self.seqs:
            seq.draft = drafts[seq.id]
        assert plan.preempted == bare.preempted
        known = [(s.seq.id, s.start, s.num_tokens - len(s.draft), s.hits) for s in plan.steps]
        assert known == [(s.seq.id, s.start, s.num_tokens, s.hits) for s in bare.steps]

    @invariant()
    def bookkeeping_holds(self) -> None:
        check(self.seqs, self.pool, BLOCK)


class WindowedMachine(SchedulerMachine):
    """The same for models with layers that see only a window: their blocks behind it are given back."""

    REACH = 6


class StatefulMachine(SchedulerMachine):
    """The same with states and without snapshots: no prefix is cached."""

    NUM_STATES = SchedulerMachine.LIMITS.max_batch


TestSchedulerMachine = SchedulerMachine.TestCase
TestWindowedMachine = WindowedMachine.TestCase
TestStatefulMachine = StatefulMachine.TestCase
