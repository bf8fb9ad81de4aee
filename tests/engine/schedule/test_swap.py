"""Preempted sequences go to host memory and come back, or are computed again; the answer is the same."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvloom.contract.config import Limits
from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.schedule.blocks import BlockPool, WindowPool
from kvloom.engine.schedule.commit import apply_step, check, commit_step, release_seq, swap_out, swap_out_windows
from kvloom.engine.schedule.places import Places
from kvloom.engine.schedule.scheduler import Circumstances, plan_step
from kvloom.engine.schedule.seq import Seq, Status
from kvloom.engine.schedule.swap import SwapCosts, is_swap_cheaper
from tests.engine.schedule.test_scheduler import BLOCK, make_seq, run_step, sampling_ids
from tests.engine.test_engine import truth
from tests.support.engine.engines import drain, fake_engine, run_all, tokens_of


@pytest.mark.parametrize(
    ("num_blocks", "num_tokens", "block_s", "token_s", "is_cheaper"),
    [(2, 8, 1.0, 0.6, True), (2, 8, 1.0, 0.5, False), (2, 8, 1.0, 0.4, False), (2, 8, 1.0, None, True)],
)
def test_two_copies_of_each_block_are_weighed_against_computing_each_token(
    num_blocks, num_tokens, block_s, token_s, is_cheaper
):
    assert is_swap_cheaper(num_blocks, num_tokens, SwapCosts(block_s, token_s)) is is_cheaper


@given(st.lists(st.integers(0, 5), max_size=20))
@example([5, 5, 5])
def test_the_host_pool_gives_each_block_to_one_holder(counts):
    pool, held = Places(9), []
    for count in counts:
        free = pool.num_free
        blocks = pool.allocate(count)
        assert (blocks is None) == (count > free)
        if blocks is None:
            pool.release(held)
            held = []
        else:
            held += blocks
        pool.check(held)


def crowded() -> tuple[list[Seq], BlockPool, Limits]:
    """Three sequences, of which the last must be preempted in the next step."""
    pool, limits = BlockPool(4, num_host_blocks=4), Limits(4, 100, BLOCK)
    seqs = [make_seq(0, 4), make_seq(1, 4, first=20), make_seq(2, 4, first=40)]
    run_step(seqs, pool, limits)
    return seqs, pool, limits


def test_a_swapped_sequence_comes_back_where_it_was():
    seqs, pool, limits = crowded()
    plan = plan_step(seqs, pool, limits)
    assert [seq.id for seq in plan.swapped] == [seq.id for seq in plan.preempted] == [2]
    block = seqs[2].block_table[0]
    copies = swap_out(plan, pool)
    assert [source for source, _ in copies] == [block]
    apply_step(plan, pool)
    commit_step(plan, {id: [7] for id in sampling_ids(plan)}, pool, BLOCK)
    check(seqs, pool, BLOCK)
    for seq in seqs[:2]:
        release_seq(seq, pool, Status.FINISHED)
    pool.allocate(2)  # evicts its blocks from the prefix cache
    plan = plan_step(seqs[2:], pool, limits)
    assert [(step.start, step.num_tokens) for step in plan.steps] == [(4, 1)]
    (work,) = apply_step(plan, pool)
    assert work.loads == [(copies[0][1], seqs[2].block_table[0])]
    assert pool.host.num_free == 4


def test_what_the_prefix_cache_still_has_is_not_copied_back():
    pool, limits = BlockPool(5, num_host_blocks=4), Limits(4, 100, BLOCK)
    seqs = [make_seq(0, 4), make_seq(1, 4, first=20), make_seq(2, 8, first=40)]
    run_step(seqs, pool, limits)
    plan = plan_step(seqs, pool, limits)
    copies = swap_out(plan, pool)
    apply_step(plan, pool)  # takes the preempted one's second block; its first stays cached
    for seq in seqs[:2]:
        release_seq(seq, pool, Status.FINISHED)
    (work,) = apply_step(plan_step(seqs[2:], pool, limits), pool)
    assert (work.start, work.num_tokens) == (8, 1)
    assert work.blocks[0] == copies[0][0]
    assert work.loads == [(copies[1][1], work.blocks[1])]


def test_a_longer_prefix_that_another_computed_is_worth_more_than_the_copy():
    pool, limits = BlockPool(8, num_host_blocks=4), Limits(4, 100, BLOCK)
    seq, other = make_seq(0, 12), make_seq(1, 12)
    run_step([other], pool, limits)
    blocks = pool.host.allocate(1)
    assert blocks is not None
    seq.host_blocks, seq.num_swapped, seq.num_preemptions = blocks, 4, 1
    plan = plan_step([seq], pool, limits)
    (step,) = plan.steps
    assert (step.start, step.num_tokens, len(step.hits)) == (8, 4, 2)
    (work,) = apply_step(plan, pool)
    assert work.loads == []
    assert pool.host.num_free == 4


def test_the_host_takes_only_as_many_as_it_has_room_for():
    pool, limits = BlockPool(3, num_host_blocks=1), Limits(4, 100, BLOCK)
    seqs = [make_seq(i, 4, first=20 * i) for i in range(3)]
    run_step(seqs, pool, limits)
    plan = plan_step(seqs, pool, limits)
    assert [seq.id for seq in plan.preempted] == [2, 1]
    assert [seq.id for seq in plan.swapped] == [2]
    assert len(swap_out(plan, pool)) == 1


def test_a_sequence_that_ends_on_the_host_leaves_nothing_there():
    seqs, pool, limits = crowded()
    plan = plan_step(seqs, pool, limits)
    swap_out(plan, pool)
    apply_step(plan, pool)
    assert pool.host.num_free == 3
    release_seq(seqs[2], pool, Status.FINISHED)
    assert pool.host.num_free == 4


def test_nobody_is_swapped_where_computing_again_is_cheaper_or_the_host_is_full():
    seqs, pool, limits = crowded()
    plan = plan_step(seqs, pool, limits, Circumstances(costs=SwapCosts(block_s=1.0, token_s=0.1)))
    assert [seq.id for seq in plan.preempted] == [2]
    assert plan.swapped == ()
    pool.host.allocate(4)
    assert plan_step(seqs, pool, limits).swapped == ()


def test_of_a_windows_blocks_those_that_it_still_holds_are_copied_and_come_back():
    pool = BlockPool(20, num_host_blocks=9, windows=WindowPool(9, 6, BLOCK))
    seqs, limits = [make_seq(0, 7), make_seq(1, 15, first=20)], Limits(4, 100, BLOCK)
    run_step(seqs, pool, limits)
    assert [seq.num_dropped for seq in seqs] == [0, 2]
    taken = pool.windows.allocate(pool.windows.num_free)
    while not (plan := plan_step(seqs, pool, limits)).preempted:
        apply_step(plan, pool)
        commit_step(plan, {id: [7] for id in sampling_ids(plan)}, pool, BLOCK)
    assert (plan.preempted, plan.swapped) == ((seqs[1],), (seqs[1],))
    copies, num_dropped, held = swap_out(plan, pool), seqs[1].num_dropped, seqs[1].held_windows
    hosts = [host_block for _, host_block in copies]
    assert swap_out_windows(plan) == list(zip(held, hosts[num_dropped:], strict=True))
    apply_step(plan, pool)
    pool.windows.release(taken)
    (work,) = [work for work in apply_step(plan_step(seqs, pool, limits), pool) if work.id == 1]
    assert work.windows[:num_dropped] == [-1] * num_dropped
    assert [host_block for host_block, _ in work.window_loads] == hosts[num_dropped:]
    assert [block for _, block in work.window_loads] == work.windows[num_dropped : len(hosts)]


@settings(max_examples=60)
@given(
    num_blocks=st.integers(9, 20),
    num_host_blocks=st.sampled_from([1, 4, 9, 100]),
    max_tokens=st.integers(4, 40),
    lengths=st.lists(st.integers(1, 20), min_size=2, max_size=8),
    is_caching=st.booleans(),
    aborted=st.sets(st.integers(0, 7), max_size=2),
)
def test_swapping_changes_no_answer(num_blocks, num_host_blocks, max_tokens, lengths, is_caching, aborted):
    engine = fake_engine(
        num_blocks, max_seq_len=36, num_host_blocks=num_host_blocks,
        max_batch=4, max_tokens_per_step=max_tokens, enable_prefix_cache=is_caching,
    )  # fmt: skip
    requests = [
        Request(f"r{i}", tuple(range(i % 2, i % 2 + n)), SamplingParams(seed=i, max_tokens=16))
        for i, n in enumerate(lengths)
    ]
    for request in requests:
        engine.add(request)
    for _ in range(12):
        for delta in engine.step():
            assert delta.request_id.startswith("r")
        engine.check()
    for i in aborted:
        engine.abort(f"r{i}")
    drain(engine)
    stats = engine.stats()
    assert (stats.num_free_blocks, stats.num_free_host_blocks) == (num_blocks, num_host_blocks)
    found = run_all(engine, *requests)
    for request in requests:
        tokens = tokens_of(found[request.id])
        assert tokens == truth(request, len(tokens))


def test_blocks_ten_times_too_few_give_the_answers_of_enough_and_were_swapped():
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    requests = [Request(f"r{i}", tuple(range(i, i + 20)), params) for i in range(40)]
    enough = 40 * 15
    roomy, tight, copied = (
        fake_engine(num_blocks=n, num_host_blocks=h, max_batch=40)
        for n, h in ((enough, 0), (enough // 10, 0), (enough // 10, enough))
    )
    answers = [{id: tokens_of(deltas) for id, deltas in run_all(e, *requests).items()} for e in (roomy, tight, copied)]
    assert answers[0] == answers[1] == answers[2]
    assert all(len(tokens) == 40 for tokens in answers[0].values())
    assert roomy.stats().total_preemptions == 0
    assert tight.stats().total_preemptions > 20
    assert tight.stats().total_swapped == 0
    assert copied.stats().total_swapped == copied.stats().total_preemptions > 20
