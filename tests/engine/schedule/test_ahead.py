"""Planning ahead: the next step is planned and sent while the previous one runs, without changing any answer."""

import socket
from dataclasses import replace

import pytest

from kvloom.contract.config import EngineConfig, Limits
from kvloom.contract.lifecycle import Failed
from kvloom.contract.messages import Batch, Done, RankMessage, StepOutput, Work
from kvloom.contract.request import Delta, FinishReason, Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.engine import Engine
from kvloom.engine.link.executor import InProcessExecutor, RankDied
from kvloom.engine.link.ranks import RankExecutor
from kvloom.engine.schedule.ahead import may_follow, must_wait
from kvloom.engine.schedule.blocks import BlockPool
from kvloom.engine.schedule.commit import apply_step, check, commit_step, is_stale, release_seq
from kvloom.engine.schedule.scheduler import plan_step
from kvloom.engine.schedule.seq import LoadStep, Plan, Seq, SeqStep, Status
from kvloom.engine.schedule.suspicion import accuse
from kvloom.processes.channel import Channel
from kvloom.rank.fake import EOS_ID, ByteTokenizer, FakeRunner
from tests.support.engine.crashes import DRAWN, ENGINES, GREEDY, answers, mortal_engine, prompt, truth
from tests.support.engine.engines import drain, fake_engine, run_all, text_of, tokens_of
from tests.support.models.adapters import TINY_SHAPES, make_adapter

BLOCK = 4
LIMITS = Limits(max_batch=4, max_tokens=32, block_size=BLOCK)


def decoding(id: int = 0, length: int = 6, **fields: object) -> Seq:
    """A running sequence whose last token is to be computed next."""
    fields = {"max_len": 30, **fields}
    return Seq(id, list(range(length)), 3, status=Status.RUNNING, num_computed=length - 1, **fields)


def computes(seq: Seq, num_tokens: int = 1) -> SeqStep:
    return SeqStep(seq, seq.next_start, num_tokens, 0)


# -- which steps may be planned ahead


def test_a_step_may_follow_decodes_with_or_without_prompts_beside_them():
    seq, prefilling, guessing, suspect = decoding(), decoding(length=9), decoding(may_run_ahead=False), decoding()
    prefilling.num_computed = 4
    accuse([suspect])
    for beside in ((), (computes(decoding(1)),), (computes(prefilling, 3),), (computes(prefilling, 5),)):
        assert may_follow(Plan((computes(seq), *beside)))
    assert may_follow(Plan())
    assert not may_follow(Plan((computes(prefilling, 5),)))
    for other in (computes(guessing), computes(suspect)):
        assert not may_follow(Plan((computes(seq), other)))


def test_whoever_has_ended_holds_nobody_up():
    ended = decoding(may_run_ahead=False)
    ended.status = Status.FINISHED
    assert may_follow(Plan((computes(ended), computes(decoding(1)))))


def test_a_plan_that_takes_blocks_from_others_or_does_nothing_waits_for_the_tokens():
    seq = decoding()
    assert must_wait(Plan())
    assert must_wait(Plan((computes(seq),), preempted=(decoding(1),)))
    assert not must_wait(Plan((computes(seq),)))
    assert not must_wait(Plan(loads=(LoadStep(seq, (), (b"key",), (b"key",)),)))


# -- two steps in flight


def two_steps(seq: Seq, pool: BlockPool) -> tuple[Plan, Plan, list[Work]]:
    """Plans and applies two steps without results of either. Returns both plans and their work."""
    first = plan_step([seq], pool, LIMITS)
    works = apply_step(first, pool)
    second = plan_step([seq], pool, LIMITS)
    works += apply_step(second, pool)
    check([seq], pool, BLOCK)
    return first, second, works


def running(length: int, pool: BlockPool, **fields: object) -> Seq:
    """A running sequence whose prompt is computed: the last of its `length` tokens is the first of the answer."""
    seq = Seq(0, list(range(length - 1)), length - 1, **{"max_len": 30, **fields})
    plan = plan_step([seq], pool, LIMITS)
    apply_step(plan, pool)
    commit_step(plan, {0: [99]}, pool, BLOCK)
    return seq


def test_the_second_begins_behind_the_token_that_the_first_will_choose_and_has_its_block():
    pool = BlockPool(8)
    seq = running(8, pool)
    first, second, works = two_steps(seq, pool)
    assert [(work.start, work.num_tokens, len(work.blocks)) for work in works] == [(7, 1, 0), (8, 1, 1)]
    assert pool.num_cached == 1, "a block is known by its hash before its last token is computed"
    commit_step(first, {0: [100]}, pool, BLOCK)
    check([seq], pool, BLOCK)
    assert (seq.num_computed, seq.num_computing, seq.token_ids[-2:], pool.num_cached) == (8, 1, [99, 100], 2)
    commit_step(second, {0: [101]}, pool, BLOCK)
    check([seq], pool, BLOCK)
    assert (seq.num_computed, seq.num_computing, seq.token_ids[-2:]) == (9, 0, [100, 101])


def test_a_block_is_known_by_its_hash_when_its_last_token_is_computed():
    pool = BlockPool(8)
    seq = running(7, pool)
    first, second, _ = two_steps(seq, pool)
    known = []
    for plan, token in ((first, 100), (second, 101)):
        commit_step(plan, {0: [token]}, pool, BLOCK)
        known.append((seq.num_computed, pool.num_cached))
    assert known == [(7, 1), (8, 2)]


def test_a_token_that_does_not_come_makes_what_was_planned_behind_it_void():
    pool = BlockPool(8)
    seq = running(8, pool)
    first, second, _ = two_steps(seq, pool)
    commit_step(first, {}, pool, BLOCK)
    check([seq], pool, BLOCK)
    again = plan_step([seq], pool, LIMITS)
    assert [(step.start, step.num_tokens) for step in again.steps] == [(7, 1)]
    apply_step(again, pool)
    assert [is_stale(plan.steps[0]) for plan in (second, again)] == [True, False]
    commit_step(second, {}, pool, BLOCK)
    commit_step(again, {0: [100]}, pool, BLOCK)
    check([seq], pool, BLOCK)
    assert (seq.num_computed, seq.token_ids[-2:]) == (8, [99, 100])


def test_a_sequence_that_ends_while_two_steps_are_under_way_gets_nothing_of_the_second():
    pool = BlockPool(8)
    seq = running(8, pool)
    first, second, _ = two_steps(seq, pool)
    commit_step(first, {0: [100]}, pool, BLOCK)
    release_seq(seq, pool, Status.FINISHED)
    assert pool.num_free == 8
    commit_step(second, {0: [101]}, pool, BLOCK)
    assert (seq.token_ids[-1], pool.num_free) == (100, 8)
    pool.check()


def test_the_parts_of_a_prompt_follow_each_other_and_its_first_decode_the_last_of_them():
    pool, limits = BlockPool(8), replace(LIMITS, max_tokens=5)
    seq = Seq(0, list(range(12)), 12, max_len=30)
    plans = []
    for _ in range(4):
        plans.append(plan_step([seq], pool, limits))
        apply_step(plans[-1], pool)
        check([seq], pool, BLOCK)
    assert [(s.start, s.num_tokens) for plan in plans for s in plan.steps] == [(0, 5), (5, 5), (10, 2), (12, 1)]
    assert seq.num_pending == 1
    found = []
    for plan, sampled in zip(plans, ({}, {}, {0: [99]}, {0: [100]}), strict=True):
        commit_step(plan, sampled, pool, BLOCK)
        check([seq], pool, BLOCK)
        found.append((seq.num_computed, seq.num_computing, seq.num_published))
    assert found == [(5, 8, 1), (10, 3, 2), (12, 1, 3), (13, 0, 3)]
    assert seq.token_ids[-2:] == [99, 100]


def test_a_prompt_that_is_aborted_under_way_leaves_nothing_behind():
    pool, limits = BlockPool(8), replace(LIMITS, max_tokens=5)
    seq = Seq(0, list(range(12)), 12, max_len=30)
    plans = []
    for _ in range(2):
        plans.append(plan_step([seq], pool, limits))
        apply_step(plans[-1], pool)
    release_seq(seq, pool, Status.FINISHED)
    for plan in plans:
        assert is_stale(plan.steps[0])
        assert commit_step(plan, {}, pool, BLOCK) == []
    assert (pool.num_free, pool.num_cached) == (8, 0)
    pool.check()


def test_a_prompt_alone_ends_with_its_last_part():
    """A prompt that is only scored or pooled needs no step after its last chunk."""
    pool = BlockPool(8)
    seq = Seq(0, list(range(6)), 6, max_len=6)
    apply_step(plan_step([seq], pool, LIMITS), pool)
    assert seq.is_ending
    assert plan_step([seq], pool, LIMITS) == Plan()


def test_nothing_is_planned_behind_a_last_token():
    pool = BlockPool(8)
    seq = running(8, pool, max_len=9)
    apply_step(plan_step([seq], pool, LIMITS), pool)
    assert seq.is_ending
    assert plan_step([seq], pool, LIMITS) == Plan()


# -- the engine


@pytest.mark.parametrize("fields", ENGINES.values(), ids=ENGINES)
def test_every_answer_is_the_same_with_and_without(fields):
    assert answers(**fields) == answers(**fields, run_ahead=False)


def test_it_is_counted_and_executors_that_overlap_nothing_go_step_by_step():
    def num_ahead(engine: Engine) -> tuple[int, bool]:
        run_all(engine, Request("a", prompt(9), GREEDY), Request("b", prompt(5, 50), DRAWN))
        return engine.stats().total_steps_ahead, engine.stats().total_steps > 8

    assert num_ahead(fake_engine()) == (7, True)
    assert num_ahead(fake_engine(run_ahead=False)) == (0, True)
    alone = Engine(
        EngineConfig(backend="fake"), InProcessExecutor(FakeRunner(EngineConfig(backend="fake"))), VOCABULARY
    )
    assert num_ahead(alone) == (0, True)


VOCABULARY = ByteTokenizer()
ANSWER = truth(Request("a", prompt(5), GREEDY), 9)
ENDS_BY_ITSELF = next(
    request
    for first in range(999)
    if EOS_ID in truth(request := Request("eos", prompt(4, first), SamplingParams(temperature=0)), 20)[2:]
)


@pytest.mark.parametrize(
    ("request_", "num_stale"),
    [
        (Request("length", prompt(5), GREEDY), 0),
        (Request("context", prompt(60), SamplingParams(temperature=0, ignore_eos=True)), 0),
        (Request("token", prompt(5), replace(GREEDY, stop_token_ids=(ANSWER[4],))), 1),
        (Request("string", prompt(5), replace(GREEDY, stop=(bytes(ANSWER[3:5]).decode(),))), 1),
        (ENDS_BY_ITSELF, 1),
        (Request("scored", prompt(9), SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0)), 0),
        (Request("one", prompt(9), replace(GREEDY, max_tokens=1)), 0),
    ],
    ids=lambda value: value.id if isinstance(value, Request) else "",
)
def test_an_end_that_nobody_foresaw_costs_one_row(request_, num_stale):
    engine = fake_engine()
    ahead = run_all(engine, request_)[request_.id]
    assert engine.stats().total_stale_rows == num_stale
    assert engine.stats().num_free_blocks == 64
    assert ahead == run_all(fake_engine(run_ahead=False), request_)[request_.id]


def test_a_block_that_is_given_away_under_a_stale_row_holds_what_its_next_owner_wrote():
    """All blocks but the neighbour's change owner while a row that may still write to one of them is in flight."""
    engine = fake_engine(num_blocks=6, max_seq_len=24, enable_prefix_cache=False)
    going, staying = Request("going", prompt(7, 90), replace(GREEDY, max_tokens=12)), Request("b", prompt(3), GREEDY)
    engine.add(going)
    engine.add(staying)
    found: list[Delta] = [delta for _ in range(2) for delta in engine.step()]
    engine.abort("going")
    coming = Request("coming", prompt(11, 40), GREEDY)
    engine.add(coming)
    rest = drain(engine)
    assert engine.stats().total_stale_rows == 1
    assert tokens_of(rest["coming"]) == truth(coming, 9)
    assert tokens_of([delta for delta in found if delta.request_id == "b"] + rest["b"]) == truth(staying, 9)


def test_an_engine_whose_last_request_has_ended_waits_for_the_row_that_is_under_way():
    engine = fake_engine()
    engine.add(ENDS_BY_ITSELF)
    ends: list[Delta] = []
    while not ends:
        ends = [delta for delta in engine.step() + engine.take_deltas() if delta.finish_reason]
    assert ends[0].finish_reason is FinishReason.EOS
    assert engine.has_work
    drain(engine)
    assert engine.stats().total_stale_rows == 1
    assert tokens_of(run_all(engine, Request("next", prompt(5), GREEDY))["next"]) == ANSWER


def test_who_gives_way_is_decided_when_the_tokens_are_known():
    engine = fake_engine(num_blocks=9, max_seq_len=36)
    requests = [Request(f"r{i}", prompt(8, 40 * i), replace(DRAWN, seed=i, max_tokens=20)) for i in range(3)]
    found = run_all(engine, *requests)
    assert engine.stats().total_preemptions > 0
    assert engine.stats().total_steps_ahead > 0
    for request in requests:
        assert tokens_of(found[request.id]) == truth(request, len(tokens_of(found[request.id])))


def begun(engine: Engine, request: Request, num_steps: int = 3) -> list[Delta]:
    engine.add(request)
    return [delta for _ in range(num_steps) for delta in engine.step()]


def test_a_reset_of_the_cache_that_preempts_waits_for_the_step_under_way():
    engine = fake_engine()
    request = Request("a", prompt(9), GREEDY)
    deltas = begun(engine, request)
    engine.reset_prefix_cache(preempts=True)
    engine.check()
    assert engine.stats().num_free_blocks == 64
    assert tokens_of(deltas + drain(engine)["a"]) == truth(request, 9)


def test_an_adapter_is_loaded_when_the_steps_under_way_have_ended(tmp_path):
    engine, executor = mortal_engine()
    request = Request("a", prompt(9), GREEDY)
    deltas = begun(engine, request)
    engine.load_adapter(str(make_adapter(tmp_path, TINY_SHAPES, 1)))
    assert not executor._outputs
    assert tokens_of(deltas + drain(engine)["a"]) == truth(request, 9)


@pytest.mark.parametrize("stop", [(), (bytes(ANSWER[1:3]).decode(),)], ids=["goes on", "has ended"])
def test_what_a_step_brought_is_told_when_the_rank_is_found_dead_by_the_step_after_it(stop):
    engine, executor = mortal_engine()
    request = Request("a", prompt(5), replace(GREEDY, stop=stop))
    other = Request("b", prompt(7, 50), GREEDY)
    engine.add(other)
    told = begun(engine, request)
    executor.die()
    with pytest.raises(RankDied):
        engine.start_step()
    told += engine.suspend()
    mine = [delta for delta in told if delta.request_id == "a"]
    assert tokens_of(mine) == ANSWER[:3]
    assert [delta.finish_reason for delta in mine if delta.finish_reason] == [FinishReason.STOP] * bool(stop)
    executor.restart()
    told += engine.resume({}) + [delta for deltas in drain(engine).values() for delta in deltas]
    assert tokens_of([delta for delta in told if delta.request_id == "b"]) == truth(other, 9)
    assert text_of([delta for delta in told if delta.request_id == "a"]) == bytes(ANSWER[: 1 if stop else 9]).decode()


def test_suspects_are_those_of_the_oldest_step_under_way():
    """The step queued behind it has not begun, and a suspect is given no second step there."""
    engine, executor = mortal_engine()
    begun(engine, Request("a", prompt(9), GREEDY))
    engine.add(Request("b", prompt(5), GREEDY))
    engine.start_step()  # with both of them, queued behind a step of the first
    executor.die()
    with pytest.raises(RankDied):
        engine.finish_step()
    engine.suspend()
    assert {live.request.id: live.seq.is_suspect for live in engine._seqs.values()} == {"a": True, "b": False}
    executor.restart()
    engine.resume({})
    before = engine.stats().total_steps_ahead
    engine.step()
    engine.step()
    assert engine.stats().total_steps_ahead == before


# -- sending to the ranks


class Spawned(RankExecutor):
    """An executor with sockets in place of processes; `rank` is the other end."""

    def __init__(self, step_timeout_s: float) -> None:
        self._config, self._ranks = EngineConfig(backend="fake", step_timeout_s=step_timeout_s), []
        ours, theirs = socket.socketpair()
        self._channels, self.rank = [Channel(ours, RankMessage)], Channel(theirs, Batch)

    def _exit_reason(self) -> str:
        return "gone"

    def refusal(self, batch: Batch) -> str:
        """The reason why the batch cannot be sent. Closes both ends."""
        with pytest.raises(RankDied) as caught:
            self.submit(batch)
        self.rank.close()
        self._channels[0].close()
        return str(caught.value)


def test_what_a_rank_said_before_it_ended_is_why_the_next_step_cannot_be_sent():
    nothing = Batch([], [], [])
    for said, why in (([Failed("ValueError: planted")], "ValueError: planted"), ([], "gone")):
        executor = Spawned(5.0)
        for message in (Done(StepOutput([], [], 0.0)), *said):
            executor.rank.send(message)
        executor.rank.close()
        assert executor.refusal(nothing) == why


def test_a_rank_that_reads_no_more_is_dead_after_the_time_of_a_step():
    large = Batch([], [], [], release=list(range(400_000)))
    assert Spawned(0.01).refusal(large) == "the model did not answer within 0.01 s"


def test_a_rank_leaves_out_what_was_planned_behind_a_token_it_did_not_choose():
    runner = FakeRunner(EngineConfig(backend="fake", num_blocks=8, block_size=4))
    engine = Engine(EngineConfig(backend="fake"), InProcessExecutor(runner), VOCABULARY)
    begun(engine, Request("a", prompt(5), GREEDY), 2)
    known = len(runner._states[0].token_ids)
    before = runner._slots[:]
    output: StepOutput = runner.run(Batch([], [Work(0, known, 1, 2, [7])], []))
    assert (output.samples, len(runner._states[0].token_ids), runner._slots) == ([], known, before)
    assert runner._states[0].blocks[2:] == [7]
