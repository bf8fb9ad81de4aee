"""Requests that kill ranks are ended, and no others: suspects run alone until they are cleared."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvloom.contract.config import Limits
from kvloom.contract.messages import Batch
from kvloom.contract.request import Delta, FinishReason, Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.engine import GUILTY
from kvloom.engine.link.executor import RankDied
from kvloom.engine.schedule.blocks import BlockPool
from kvloom.engine.schedule.commit import apply_step
from kvloom.engine.schedule.repute import FIRST_PROOF, MAX_PROOF
from kvloom.engine.schedule.scheduler import Circumstances, plan_step
from kvloom.engine.schedule.seq import Seq, Status
from kvloom.engine.schedule.suspicion import accuse, next_alone
from tests.support.engine.crashes import (
    ENGINES,
    GREEDY,
    MIXED,
    answers,
    mortal_engine,
    prompt,
    run_through,
    said,
    step,
    truth,
)
from tests.support.engine.engines import tokens_of


def suspects(*lengths: int) -> list[Seq]:
    return [Seq(i, list(range(length)), length) for i, length in enumerate(lengths)]


def test_who_was_computed_is_a_suspect_until_it_has_brought_a_few_tokens():
    (seq,) = suspects(5)
    assert accuse([seq]) == []
    for _ in range(FIRST_PROOF):
        assert next_alone([seq]) is seq
        seq.token_ids.append(0)
    assert next_alone([seq]) is None


def test_every_crash_asks_for_twice_the_proof_up_to_a_bound():
    (seq,) = suspects(5)
    proofs = []
    for _ in range(7):
        assert accuse([seq]) == []
        proofs.append(seq.repute.cleared_len - len(seq.token_ids))
        seq.token_ids += [0] * proofs[-1]
    assert proofs == [2, 4, 8, 16, MAX_PROOF, MAX_PROOF, MAX_PROOF]


def test_whoever_has_begun_goes_on_and_then_the_first_in_turn():
    first, second, third, other = suspects(5, 5, 5, 5)
    accuse([first, second, third])
    third.turn = -1.0
    assert next_alone([other, first, second, third]) is third
    first.status = Status.RUNNING
    assert next_alone([other, first, second, third]) is first
    first.status = third.status = Status.LOADING
    assert next_alone([other, first, second, third]) is second
    second.status = Status.LOADING
    assert next_alone([other, first, second, third]) is None


@pytest.mark.parametrize("max_preempt", [None, 0])
def test_a_suspect_that_finds_no_room_gets_that_of_the_last_one_and_never_its_own(max_preempt: int | None):
    pool = BlockPool(4)
    limits = Limits(max_batch=4, max_tokens=16, block_size=4, max_preempt=max_preempt)
    first, second, suspect = suspects(8, 8, 8)
    for seq in (first, second):
        apply_step(plan_step([seq], pool, limits), pool)
    accuse([suspect])
    plan = plan_step([first, second, suspect], pool, limits, Circumstances(alone=suspect))
    assert (plan.preempted, plan.steps) == ((second,), ())
    apply_step(plan, pool)
    (step,) = plan_step([first, second, suspect], pool, limits, Circumstances(alone=suspect)).steps
    assert step.seq is suspect


def has(token: int) -> Callable[[Batch], list[int]]:
    """A function of a batch: the positions that it computes up to, of sequences whose prompt begins with `token`."""
    known: dict[int, bool] = {}

    def find(batch: Batch) -> list[int]:
        known.update({new.id: new.token_ids[0] == token for new in batch.new})
        return [work.start + work.num_tokens for work in batch.work if known[work.id]]

    return find


POISONS = {
    "its prompt": lambda ends, work: bool(ends),
    "its fifth token": lambda ends, work: any(end >= 14 for end in ends),
    "a decode": lambda ends, work: any(end > 10 for end in ends) and all(item.num_tokens == 1 for item in work),
}


@pytest.mark.parametrize("kind", POISONS)
@pytest.mark.parametrize("fields", ENGINES.values(), ids=ENGINES)
def test_poison_kills_twice_and_then_ends_and_the_others_have_their_answers(kind, fields):
    find = has(250)

    def kills(batch: Batch) -> bool:
        return POISONS[kind](find(batch), batch.work)

    engine, executor = mortal_engine(kills, **fields)
    poison = Request("poison", (250, *prompt(9)), replace(GREEDY, max_tokens=30))
    found = run_through(engine, executor, *MIXED[:5], poison, *MIXED[5:])
    (*_, last) = found.pop("poison")
    assert (last.finish_reason, last.error) == (FinishReason.ERROR, GUILTY)
    assert {name: said(deltas) for name, deltas in found.items()} == answers(**fields)
    stats = engine.stats()
    assert (stats.total_crashes, stats.total_guilty) == (2, 1)


def test_two_that_kill_in_company_are_through_after_a_few_crashes():
    one, other = has(250), has(251)
    requests = [Request(f"{i}", (i, *prompt(9)), replace(GREEDY, max_tokens=30)) for i in (250, 251)]

    def kills(batch: Batch) -> bool:
        both = one(batch), other(batch)
        return all(both)

    engine, executor = mortal_engine(kills)
    found = run_through(engine, executor, *requests, *MIXED)
    for request in requests:
        assert tokens_of(found[request.id]) == truth(request, 30)
    assert 1 < engine.stats().total_crashes <= 6


def test_a_suspect_that_a_rank_survives_often_enough_is_forgiven():
    """Each crash comes after the request has been cleared again."""
    engine, executor = mortal_engine()
    request = Request("a", prompt(4), replace(GREEDY, max_tokens=50))
    engine.add(request)
    found: list[Delta] = []
    for _ in range(3):
        found += step(engine, executor)
        while any(live.seq.is_suspect for live in engine._seqs.values()):
            found += step(engine, executor)
        executor.kills = lambda batch: bool(batch.work)
        found += step(engine, executor)
        executor.kills = lambda batch: False
    found += [delta for deltas in run_through(engine, executor).values() for delta in deltas]
    assert tokens_of(found) == truth(request, 50)
    assert (engine.stats().total_crashes, engine.stats().total_resumed) == (3, 3)


class CrashMachine(RuleBasedStateMachine):
    """Random arrivals, halves of steps, aborts, crashes and poisonous requests, over too few blocks: every answer is a
    prefix of the true one and each ends once. A request ended by suspicion had two crashes, alone at the second.
    """

    POISON = 250

    def __init__(self) -> None:
        super().__init__()
        self.is_poison = has(self.POISON)
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, str | None] = {}
        self.in_step = False
        self.kills_next = False

    @initialize(run_ahead=st.booleans())
    def make(self, run_ahead: bool) -> None:
        sizes = {"num_blocks": 14, "num_host_blocks": 5, "max_seq_len": 36, "max_batch": 3, "max_tokens_per_step": 9}
        self.engine, self.executor = mortal_engine(self.kills, **sizes, run_ahead=run_ahead)

    def kills(self, batch: Batch) -> bool:
        return bool(self.is_poison(batch)) or self.kills_next

    @rule(length=st.integers(1, 30), first=st.sampled_from([0, 50, POISON]), max_tokens=st.integers(0, 20))
    def arrive(self, length: int, first: int, max_tokens: int) -> None:
        name = f"r{len(self.requests)}"
        params = SamplingParams(seed=len(self.requests), max_tokens=max_tokens)
        self.requests[name] = Request(name, prompt(length, first), params)
        self.engine.add(self.requests[name])

    @precondition(lambda self: not self.in_step)
    @rule(kills=st.booleans())
    def start(self, kills: bool) -> None:
        self.kills_next = kills
        try:
            self.hear(self.engine.start_step())
        except RankDied:
            self.crash()
        else:
            self.in_step = True

    @precondition(lambda self: self.in_step)
    @rule()
    def finish(self) -> None:
        self.in_step = False
        computing = self.engine.computing
        if any(seq.is_suspect for seq in computing):
            assert len(computing) == 1, "a suspect had company"
        try:
            self.engine.finish_step()
        except RankDied:
            self.crash()

    @precondition(lambda self: not self.in_step)
    @rule()
    def die(self) -> None:
        self.executor.die()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.abort(data.draw(st.sampled_from(sorted(self.requests))))

    def crash(self) -> None:
        computing = self.engine.computing
        guilty = {
            live.request.id for live in self.engine._seqs.values() if live.seq in computing and live.seq.is_suspect
        }
        assert len(guilty) <= len(computing) == 1 or not guilty
        deltas = self.engine.suspend()
        assert {delta.request_id for delta in deltas if delta.error} == guilty
        assert self.engine.stats().num_free_blocks == 14
        self.hear(deltas)
        self.executor.restart()
        self.hear(self.engine.resume({}))

    def hear(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            assert delta.request_id not in self.ended, "a delta after the last"
            self.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.finish_reason:
                self.ended[delta.request_id] = delta.error

    @invariant()
    def answers_are_true(self) -> None:
        for name, tokens in self.tokens.items():
            assert tokens == truth(self.requests[name], len(tokens))
        self.engine.check()

    def teardown(self) -> None:
        if self.in_step:
            self.finish()
        self.executor.restart()
        self.hear(self.engine.suspend() + self.engine.resume({}))  # as after one more crash
        for _ in range(3000):
            if not self.engine.has_work:
                break
            self.start(kills=False)
            if self.in_step:
                self.finish()
        assert set(self.ended) == set(self.requests)
        poison = [name for name, request in self.requests.items() if request.prompt_ids[0] == self.POISON]
        assert not any(self.tokens.get(name) for name in poison)
        assert self.engine.stats().num_free_blocks == 14


TestCrashMachine = CrashMachine.TestCase
TestCrashMachine.settings = settings(max_examples=60, stateful_step_count=30)
