"""Which sequences wait for the outer KV tier, and who owns their blocks meanwhile. Lengths and block numbers only."""

import pytest

from kvloom.contract.config import Limits
from kvloom.contract.messages import Batch, Moved, Transfer
from kvloom.engine.schedule.blocks import BlockPool
from kvloom.engine.schedule.commit import apply_step, check, commit_step, release_seq
from kvloom.engine.schedule.scheduler import Circumstances, plan_step
from kvloom.engine.schedule.seq import Plan, Seq, Status
from kvloom.engine.schedule.transfers import PATIENCE, Moves, Transfers
from tests.engine.schedule.test_scheduler import BLOCK, counts, make_seq, sampling_ids

LIMITS = Limits(4, 100, BLOCK)


def begin(seqs: list[Seq], pool: BlockPool, transfers: Transfers, now_s: float = 0.0, limits: Limits = LIMITS) -> Plan:
    """Plans and applies a step in which waiting sequences ask the tier."""
    plan = plan_step(seqs, pool, limits, Circumstances(asks_tier=True))
    apply_step(plan, pool)
    transfers.load(plan.loads, now_s)
    return plan


def end(seqs: list[Seq], plan: Plan, pool: BlockPool, transfers: Transfers) -> None:
    transfers.save(commit_step(plan, {id: [7] for id in sampling_ids(plan)}, pool, BLOCK))
    check(seqs, pool, BLOCK, *transfers.held())


def taken(transfers: Transfers) -> tuple[list[Transfer], list[Transfer]]:
    """Loads and saves that the rank was not sent yet."""
    batch = Batch([], [], [])
    transfers.fill(batch)
    return batch.loads, batch.saves


def loads_of(plan: Plan) -> dict[int, int]:
    """Number of blocks to load, by sequence."""
    return {load.seq.id: len(load.keys) for load in plan.loads}


def test_a_waiting_sequence_asks_once_for_the_full_blocks_before_its_last_token_and_is_then_admitted_with_them():
    pool, seq = BlockPool(8), make_seq(0, 12)
    transfers = Transfers(pool, 1.0)
    plan = begin([seq], pool, transfers)
    assert (loads_of(plan), counts(plan), seq.status) == ({0: 2}, {}, Status.LOADING)
    (load,), saves = taken(transfers)
    assert (load.keys, saves, taken(transfers)) == (seq.hashes[:2], [], ([], []))
    assert begin([seq], pool, transfers) == Plan()
    check([seq], pool, BLOCK, *transfers.held())
    transfers.finish([Moved(load.id, 1)], True)
    assert (seq.status, pool.num_free, transfers.counts()["total_tier_loaded_blocks"]) == (Status.WAITING, 8, 1)
    plan = begin([seq], pool, transfers)
    assert (loads_of(plan), plan.steps[0].start, plan.steps[0].hits) == ({}, 4, (load.blocks[0],))


def test_without_a_tier_nobody_asks():
    pool, seq = BlockPool(8), make_seq(0, 12)
    assert counts(plan_step([seq], pool, LIMITS)) == {0: 12}
    transfers = Transfers(pool, None)
    assert not transfers.may_ask(is_idle=True)
    transfers.save([[0]])
    assert not transfers.is_pending


def test_a_sequence_that_must_compute_all_or_has_no_full_block_does_not_ask():
    seqs = [make_seq(0, 12, may_reuse=False), make_seq(1, 4, first=50)]
    plan = plan_step(seqs, BlockPool(8), LIMITS, Circumstances(asks_tier=True))
    assert (counts(plan), plan.loads) == ({0: 12, 1: 4}, ())


def test_others_are_admitted_past_a_loading_sequence_but_not_those_that_lack_the_same_block():
    pool = BlockPool(16)
    transfers = Transfers(pool, 1.0)
    seqs = [make_seq(0, 12), make_seq(1, 16), make_seq(2, 3, first=60)]
    plan = begin(seqs, pool, transfers)
    assert (loads_of(plan), counts(plan)) == ({0: 2}, {2: 3})
    assert seqs[1].status is Status.WAITING
    end(seqs, plan, pool, transfers)
    assert loads_of(begin(seqs[:2], pool, transfers)) == {}
    transfers.finish([Moved(1, 2)], True)
    plan = begin(seqs[:2], pool, transfers)
    assert (loads_of(plan), counts(plan)) == ({}, {0: 4}), "0 computes the third block of 1"
    end(seqs, plan, pool, transfers)
    plan = begin(seqs[:2], pool, transfers)
    assert (loads_of(plan), counts(plan)) == ({}, {0: 1, 1: 4})
    assert pool.num_holders(plan.steps[1].hits[0]) == 2


def test_loading_sequences_count_towards_max_batch():
    pool = BlockPool(32)
    transfers = Transfers(pool, 1.0)
    seqs = [make_seq(i, 6, first=20 * i) for i in range(5)]
    limits = Limits(2, 100, BLOCK)
    assert loads_of(begin(seqs, pool, transfers, limits=limits)) == {0: 1, 1: 1}
    assert begin(seqs, pool, transfers, limits=limits) == Plan()


def test_blocks_of_loads_are_not_promised_twice():
    pool = BlockPool(4)
    transfers = Transfers(pool, 1.0)
    seqs = [make_seq(0, 12), make_seq(1, 12, first=50)]
    assert loads_of(begin(seqs, pool, transfers)) == {0: 2}  # two of the four blocks are taken, three more do not fit
    check(seqs, pool, BLOCK, *transfers.held())


def test_hits_of_a_load_are_held_with_it():
    pool = BlockPool(4)
    transfers = Transfers(pool, 1.0)
    first = make_seq(0, 4)
    end([first], begin([first], pool, transfers), pool, transfers)
    (save,) = taken(transfers)[1]
    transfers.finish([Moved(save.id, 1)], True)
    release_seq(first, pool, Status.FINISHED)
    again = make_seq(1, 12)
    plan = begin([again], pool, transfers)
    assert plan.loads[0].hits == (save.blocks[0],)
    assert pool.num_free == 2
    check([again], pool, BLOCK, *transfers.held())


def test_who_has_waited_long_enough_goes_on_and_a_late_report_wakes_nobody():
    pool, seq = BlockPool(8), make_seq(0, 12)
    transfers = Transfers(pool, 1.0)
    begin([seq], pool, transfers, now_s=10.0)
    transfers.expire(10.0 + PATIENCE - 0.01)
    assert seq.status is Status.LOADING
    transfers.expire(10.0 + PATIENCE)
    assert (seq.status, pool.num_free) == (Status.WAITING, 6)
    seq.is_asked = False  # as after a preemption
    begin([seq], pool, transfers, now_s=12.0)
    transfers.expire(12.1)
    transfers.finish([Moved(1, 2)], True)
    assert seq.status is Status.LOADING
    check([seq], pool, BLOCK, *transfers.held())


def test_an_aborted_sequence_leaves_the_blocks_to_the_load():
    pool, seq = BlockPool(8), make_seq(0, 12)
    transfers = Transfers(pool, 1.0)
    begin([seq], pool, transfers)
    release_seq(seq, pool, Status.FINISHED)
    assert pool.num_free == 6
    transfers.finish([Moved(1, 2)], True)
    assert (seq.status, pool.num_free, pool.num_cached) == (Status.FINISHED, 8, 2)


@pytest.mark.parametrize("count", [-1, 3])
def test_an_impossible_number_of_blocks_is_none(count):
    pool, seq = BlockPool(8), make_seq(0, 12)
    transfers = Transfers(pool, 1.0)
    begin([seq], pool, transfers)
    transfers.finish([Moved(77, 1), Moved(1, count), Moved(1, 2)], True)
    assert (pool.num_cached, pool.num_free, transfers.counts()["total_tier_loaded_blocks"]) == (0, 8, 0)


def test_new_blocks_are_saved_once_and_held_until_the_report():
    pool, seqs = BlockPool(16), [make_seq(0, 9), make_seq(1, 9)]
    transfers = Transfers(pool, 1.0)
    plan = plan_step(seqs, pool, LIMITS)
    apply_step(plan, pool)
    end(seqs, plan, pool, transfers)
    (save,) = taken(transfers)[1]  # only one save: the second sequence computed the same blocks
    assert (save.keys, save.blocks) == (seqs[0].hashes, seqs[0].block_table[:2])
    for seq in seqs:
        release_seq(seq, pool, Status.FINISHED)
    assert (pool.num_free, transfers.is_pending) == (14, True)
    transfers.finish([Moved(save.id, 2)], True)
    assert (pool.num_free, transfers.counts()["total_tier_saved_blocks"], transfers.is_pending) == (16, 2, False)


def test_saves_hold_a_quarter_of_the_blocks_and_a_tier_that_is_down_gets_none():
    pool = BlockPool(16)
    transfers = Transfers(pool, 1.0)
    for seq in (make_seq(0, 24), make_seq(1, 9, first=50)):
        plan = plan_step([seq], pool, LIMITS)
        apply_step(plan, pool)
        transfers.save(commit_step(plan, {}, pool, BLOCK))
    (save,) = taken(transfers)[1]
    assert len(save.blocks) == 4
    transfers.finish([Moved(save.id, 0)], False)
    transfers.save([save.blocks])
    assert not transfers.is_pending
    assert (transfers.may_ask(is_idle=False), transfers.may_ask(is_idle=True)) == (False, True)


def compute(seq: Seq, pool: BlockPool, transfers: Transfers) -> list[bytes]:
    """Computes `seq` in one step and ends it. Returns the keys that were given to the tier for it."""
    plan = plan_step([seq], pool, LIMITS)
    apply_step(plan, pool)
    transfers.save_missing(plan.steps)
    end([seq], plan, pool, transfers)
    release_seq(seq, pool, Status.FINISHED)
    return [key for save in taken(transfers)[1] for key in save.keys]


def test_cached_blocks_that_a_tier_did_not_get_are_saved_when_they_are_next_used():
    pool = BlockPool(32)
    transfers = Transfers(pool, 1.0)
    transfers.finish([], False)
    seqs = [make_seq(i, 12) for i in range(5)]
    assert compute(seqs[0], pool, transfers) == []
    assert compute(seqs[1], pool, transfers) == [], "it is down"
    transfers.finish([], True)
    assert compute(seqs[2], pool, transfers) == seqs[2].hashes[:2]
    assert compute(seqs[3], pool, transfers) == [], "it has them, or is getting them"
    transfers.finish([Moved(1, 2)], True)
    transfers.finish([], False)
    transfers.finish([], True)
    assert compute(seqs[4], pool, transfers) == seqs[4].hashes[:2], "it may have lost them"


def test_what_exceeded_the_share_for_saves_is_saved_when_it_is_next_used():
    pool = BlockPool(16)
    transfers = Transfers(pool, 1.0)
    seqs = [make_seq(i, 26) for i in range(3)]
    assert compute(seqs[0], pool, transfers) == seqs[0].hashes[:4]
    transfers.finish([Moved(1, 4)], True)
    assert compute(seqs[1], pool, transfers) == seqs[1].hashes[4:6]
    transfers.finish([Moved(2, 1)], True)
    assert compute(seqs[2], pool, transfers) == [], "a tier without room is not asked again"


def test_a_block_with_new_contents_is_saved_and_a_loaded_one_is_not():
    pool = BlockPool(4)
    transfers = Transfers(pool, 1.0)
    first, other = make_seq(0, 6), make_seq(1, 6, first=50)
    assert compute(first, pool, transfers) == first.hashes
    transfers.finish([Moved(1, 1)], True)
    pool.release(pool.allocate(4) or [])  # evicts everything
    assert compute(other, pool, transfers) == other.hashes
    transfers.finish([Moved(2, 1)], True)
    loaded = make_seq(2, 6, first=90)
    begin([loaded], pool, transfers)
    (load,) = taken(transfers)[0]
    transfers.finish([Moved(load.id, 1)], True)
    assert compute(loaded, pool, transfers) == []


def test_a_preempted_sequence_may_ask_again():
    pool = BlockPool(2)
    transfers = Transfers(pool, 1.0)
    seqs = [make_seq(0, 4, is_asked=True), make_seq(1, 4, first=20, is_asked=True)]
    for _ in range(2):
        plan = begin(seqs, pool, transfers)
        commit_step(plan, {id: [7] for id in sampling_ids(plan)}, pool, BLOCK)
    assert [seq.is_asked for seq in seqs] == [True, False]


def test_a_transfer_of_several_ranks_ends_with_the_last_and_as_far_as_all_came():
    moves = Moves(num_ranks=2)
    assert moves.merge([[Moved(1, 4), Moved(2, 3)], [Moved(2, 1)]]) == [Moved(2, 1)]
    assert moves.merge([[], []]) == []
    assert moves.merge([[], [Moved(1, 5)]]) == [Moved(1, 4)]
    assert moves.merge([[Moved(2, 2)], [Moved(2, 2)]]) == [Moved(2, 2)]  # the number may be used again
