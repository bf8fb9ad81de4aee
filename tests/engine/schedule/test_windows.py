"""Layers that see a window have blocks of their own: free behind the window, found by the last window alone, and no
answer changes. The fake model reads every block of a window before it computes.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvloom.contract.config import EngineConfig, Limits
from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.engine import Engine
from kvloom.engine.link.executor import RankDied
from kvloom.engine.schedule.blocks import BlockPool, WindowPool
from kvloom.engine.schedule.commit import apply_step, check, commit_step, release_seq
from kvloom.engine.schedule.prefix import find_prefix
from kvloom.engine.schedule.scheduler import plan_step
from kvloom.engine.schedule.seq import Seq, Status, num_blocks_of
from kvloom.rank.byte_tokenizer import ByteTokenizer
from tests.engine.schedule.test_scheduler import BLOCK, make_seq, sampling_ids
from tests.engine.test_engine import EngineMachine, prompt, truth
from tests.support.engine.crashes import MortalExecutor
from tests.support.engine.engines import drain, run_all, tokens_of
from tests.support.engine.windowed import windowed_engine, windowed_runner

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LIMITS = Limits(4, 8, BLOCK)


def pool_of(num_blocks: int, num_window_blocks: int, reach: int, num_host_blocks: int = 0) -> BlockPool:
    return BlockPool(num_blocks, True, num_host_blocks, windows=WindowPool(num_window_blocks, reach, BLOCK))


def run_step(seqs: list[Seq], pool: BlockPool, limits: Limits = LIMITS) -> None:
    plan = plan_step(seqs, pool, limits)
    apply_step(plan, pool)
    commit_step(plan, {id: [7] for id in sampling_ids(plan)}, pool, BLOCK)
    check(seqs, pool, BLOCK)


def test_a_windows_blocks_are_free_behind_it_and_the_others_are_kept():
    seq, pool = make_seq(0, 20, max_len=60), pool_of(16, 9, reach=10)
    held = []
    for _ in range(30):
        run_step([seq], pool)
        held.append((len(seq.block_table), len(seq.held_windows)))
    assert {windows for _, windows in held[3:]} == {3}, "the 9 tokens that the next step reads besides its own"
    assert held[-1] == (
        num_blocks_of(seq.num_computed, BLOCK),
        num_blocks_of(seq.num_computed, BLOCK) - seq.num_dropped,
    )
    assert seq.num_dropped == (seq.num_computed + 1 - 10) // BLOCK
    release_seq(seq, pool, Status.FINISHED)
    check([seq], pool, BLOCK)
    assert (pool.num_free, pool.windows.num_free) == (16, 9)


@given(
    known=st.lists(st.booleans(), max_size=14),
    num_all=st.integers(0, 14),
    reach=st.integers(1, 30),
)
def test_the_longest_prefix_is_found_before_which_the_last_window_is_known(known, num_all, reach):
    hashes = [b"%d" % index for index in range(len(known))]
    pool = pool_of(20, 20, reach)
    for index, key in enumerate(hashes):
        if known[index]:
            pool.windows.publish(index, key)
        if index < num_all:
            pool.publish(index, key)
    good = [
        count
        for count in range(min(num_all, len(known)) + 1)
        if all(known[index] for index in range(max(0, count * BLOCK + 1 - reach) // BLOCK, count))
    ]
    seq = Seq(0, list(range(len(hashes) * BLOCK + 1)), len(hashes) * BLOCK + 1)
    seq.hashes = hashes
    found = find_prefix(seq, pool, BLOCK)
    first = max(0, good[-1] * BLOCK + 1 - reach) // BLOCK
    assert (found.hits, found.start) == (list(range(good[-1])), good[-1] * BLOCK)
    assert (found.windows, found.num_dropped) == (tuple(range(first, good[-1])), first)


def test_a_prompt_whose_early_window_blocks_are_gone_still_hits():
    engine = windowed_engine(num_blocks=64, num_window_blocks=8, reach=9, max_batch=4, max_tokens_per_step=8)
    first = run_all(engine, Request("a", prompt(41), PARAMS))["a"]
    again = run_all(engine, Request("b", prompt(41), PARAMS))["b"]
    assert (tokens_of(again), again[0].num_cached_tokens) == (tokens_of(first), 40)


def test_a_prompt_whose_last_window_is_gone_begins_where_one_is_known():
    engine = windowed_engine(num_blocks=64, num_window_blocks=9, reach=9, max_batch=4, max_tokens_per_step=8)
    first = run_all(engine, Request("a", prompt(30), PARAMS))["a"]
    run_all(engine, Request("b", prompt(40, 100), PARAMS))
    again = run_all(engine, Request("c", prompt(30), PARAMS))["c"]
    assert tokens_of(again) == tokens_of(first)
    assert again[0].num_cached_tokens == 0
    stats = engine.stats()
    assert (stats.total_block_hits, stats.total_window_hits, stats.total_windowless_tokens) == (0, 0, 28)
    known = run_all(engine, Request("d", prompt(30), PARAMS))["d"]
    assert (tokens_of(known), known[0].num_cached_tokens) == (tokens_of(first), 29)
    stats = engine.stats()
    assert (stats.total_block_hits, stats.total_window_hits, stats.total_windowless_tokens) == (8, 3, 28)


def test_a_long_prompt_is_computed_in_the_window_blocks_that_there_are():
    engine = windowed_engine(num_blocks=64, num_window_blocks=6, reach=9, max_seq_len=200, max_tokens_per_step=64)
    found = run_all(engine, Request("a", prompt(150), PARAMS), Request("b", prompt(90, 3), PARAMS))
    for name, request in (("a", prompt(150)), ("b", prompt(90, 3))):
        assert tokens_of(found[name]) == truth(Request(name, request, PARAMS), 12)


@pytest.mark.parametrize("max_preempt", [None, 0])
def test_sequences_that_lack_a_windows_blocks_wait_or_give_way(max_preempt):
    engine = windowed_engine(num_blocks=400, num_window_blocks=8, reach=9, max_preempt=max_preempt)
    requests = [Request(f"{i}", prompt(5 + i, i), SamplingParams(seed=i, max_tokens=20)) for i in range(6)]
    found = run_all(engine, *requests)
    for request in requests:
        tokens = tokens_of(found[request.id])
        assert tokens == truth(request, len(tokens))
    assert (engine.stats().total_preemptions > 0) == (max_preempt is None)
    assert engine._pool.windows.num_free == 8


def test_answers_to_one_prompt_share_its_last_window():
    engine = windowed_engine(num_window_blocks=20, max_batch=4, max_tokens_per_step=8)
    requests = [Request(f"{i}", prompt(29), SamplingParams(seed=i, max_tokens=9)) for i in range(4)]
    found = run_all(engine, *requests)
    assert [found[r.id][0].num_cached_tokens for r in requests] == [0, 28, 28, 28]
    assert all(tokens_of(found[r.id]) == truth(r, len(tokens_of(found[r.id]))) for r in requests)


def test_a_part_of_a_block_is_copied_with_that_of_its_window():
    """Choices that are scored: each begins with a copy of the block in which the prompt ends."""
    engine = windowed_engine(max_tokens_per_step=64)
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=0, scored_from=30)
    requests = [Request(f"{i}", (*prompt(30), 200 + i), params) for i in range(3)]
    found = run_all(engine, *requests)
    assert [found[r.id][0].num_cached_tokens for r in requests] == [0, 29, 29]


@settings(max_examples=60)
@given(
    num_blocks=st.integers(9, 20),
    num_window_blocks=st.integers(6, 12),
    num_host_blocks=st.sampled_from([0, 4, 100]),
    max_tokens=st.integers(4, 40),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    reach=st.integers(1, 12),
    is_caching=st.booleans(),
)
def test_too_few_blocks_change_no_answer(
    num_blocks, num_window_blocks, num_host_blocks, max_tokens, lengths, reach, is_caching
):
    engine = windowed_engine(
        num_blocks, 4, 36, num_window_blocks, reach, num_host_blocks,
        max_batch=4, max_tokens_per_step=max_tokens, enable_prefix_cache=is_caching,
    )  # fmt: skip
    for turn in range(2):
        requests = [
            Request(f"{turn}-{i}", prompt(n, i % 2), SamplingParams(seed=i, max_tokens=16))
            for i, n in enumerate(lengths)
        ]
        found = run_all(engine, *requests)
        for request in requests:
            tokens = tokens_of(found[request.id])
            assert tokens == truth(request, len(tokens))
            assert found[request.id][-1].finish_reason is not None
    assert engine.stats().num_free_blocks == num_blocks
    assert engine._pool.windows.num_free == num_window_blocks


def test_blocks_of_rejected_drafts_are_given_back_in_both_pools():
    seq, pool, limits = make_seq(0, 4, max_len=40), pool_of(8, 8, reach=6), Limits(4, 16, BLOCK, max_draft_tokens=8)
    run_step([seq], pool, limits)
    seq.draft, seq.may_run_ahead = [1] * 6, False
    plan = plan_step([seq], pool, limits)
    apply_step(plan, pool)
    assert (len(seq.block_table), len(seq.window_table)) == (3, 3)
    commit_step(plan, {0: [7]}, pool, BLOCK)
    check([seq], pool, BLOCK)
    assert (len(seq.block_table), len(seq.window_table)) == (2, 2)
    assert (pool.num_free, pool.windows.num_free) == (6, 6)


def test_what_is_swapped_out_comes_back_with_its_window():
    engine = windowed_engine(12, 4, 64, 12, 9, num_host_blocks=40, max_batch=4)
    requests = [Request(f"{i}", prompt(12, 40 * i), SamplingParams(seed=i, max_tokens=30)) for i in range(4)]
    found = run_all(engine, *requests)
    assert engine.stats().total_swapped == engine.stats().total_preemptions > 0
    for request in requests:
        tokens = tokens_of(found[request.id])
        assert tokens == truth(request, len(tokens))


def test_a_reset_or_released_cache_is_found_by_nobody():
    engine = windowed_engine()
    for forget in (engine.reset_prefix_cache, engine.release_free):
        first = run_all(engine, Request("a", prompt(30), PARAMS))["a"]
        forget()
        engine.check()
        again = run_all(engine, Request("b", prompt(30), PARAMS))["b"]
        assert (tokens_of(again), again[0].num_cached_tokens) == (tokens_of(first), 0)
        forget()


def test_after_a_crash_everything_is_computed_again():
    executor = MortalExecutor(windowed_runner)
    config = EngineConfig(backend="fake", num_speculative_tokens=0, max_batch=4, max_tokens_per_step=8)
    engine, request = Engine(config, executor, ByteTokenizer()), Request("a", prompt(30), PARAMS)
    engine.add(request)
    deltas = [delta for _ in range(9) for delta in engine.step()]
    executor.die()
    with pytest.raises(RankDied):
        engine.step()
    deltas += engine.suspend()
    executor.restart()
    deltas += engine.resume({}) + drain(engine)["a"]
    assert tokens_of(deltas) == truth(request, 12)
    assert engine.stats().total_resumed == 1


class WindowedEngineMachine(EngineMachine):
    """The same for a model with windows, which reads every block of them at each step."""

    @initialize(
        run_ahead=st.booleans(),
        reach=st.integers(1, 14),
        num_window_blocks=st.integers(7, 9),
        num_host_blocks=st.sampled_from([0, 9]),
    )
    def make(self, run_ahead: bool, reach: int, num_window_blocks: int, num_host_blocks: int) -> None:
        sizes = {"max_batch": 3, "max_tokens_per_step": 9, "run_ahead": run_ahead}
        self.engine = windowed_engine(9, 4, 36, num_window_blocks, reach, num_host_blocks, **sizes)

    @precondition(lambda self: self.deltas)
    @rule(data=st.data(), num_answer=st.integers(0, 20), more=st.lists(st.integers(1, 3), max_size=3))
    def go_on(self, data: st.DataObject, num_answer: int, more: list[int]) -> None:
        """A request that begins with another's prompt and a part of its answer."""
        before = self.requests[data.draw(st.sampled_from(sorted(self.deltas)))]
        tokens = [*before.prompt_ids, *truth(before, num_answer), *more][:35]
        name, seed = f"r{len(self.requests)}", len(self.requests)
        self.requests[name] = Request(name, tuple(tokens), SamplingParams(seed=seed, max_tokens=5))
        self.engine.add(self.requests[name])

    def teardown(self) -> None:
        super().teardown()
        assert self.engine._pool.windows.num_free == self.engine._pool.windows.num_blocks


TestWindowedEngineMachine = WindowedEngineMachine.TestCase
