"""Blocks of layers with a window in the outer KV tier: what is saved, what a new engine loads, and that a tier which
lost, delays or refuses anything costs computing, never an answer. The fake model reads a window before each step.
"""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvloom.contract.messages import Batch, Moved
from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from kvloom.contract.windows import WindowBlocks, first_read, longest_prefix, most_in_window
from kvloom.engine.engine import Engine
from kvloom.engine.schedule.blocks import BlockPool, WindowPool
from kvloom.engine.schedule.seq import LoadStep, Seq, Status
from kvloom.engine.schedule.snapshots import Snapshots
from kvloom.engine.schedule.transfers import MAX_SAVING, Transfers
from tests.engine.rank.test_kvtier import TierMachine, keys_of, truth
from tests.engine.test_engine import prompt
from tests.support.engine.engines import run_all, tokens_of
from tests.support.engine.tiers import FakeTier, engine_over_tier
from tests.support.engine.windowed import windowed_runner

REACH = 9  # with blocks of 4: the last window lies in 2 blocks
NUMBERS = itertools.count()


def opened(before: FakeTier | None = None, **sizes: int) -> tuple[Engine, FakeTier]:
    """An engine over a model with windows, and its tier, which has what the tier `before` has."""
    runner = windowed_runner(reach=REACH, **{"num_window_blocks": 64, **sizes})
    engine, tier, _ = engine_over_tier(runner, num_speculative_tokens=0)
    if before is not None:
        tier.stored, tier.windows = before.stored, before.windows
    return engine, tier


def ask(engine: Engine, tokens: Sequence[int], max_tokens: int = 5, **more: object) -> int:
    """How many tokens of the prompt were found computed; the answer is the model's."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    request = Request(f"r{next(NUMBERS)}", tuple(tokens), params, **more)
    found = run_all(engine, request)[request.id]
    assert tokens_of(found) == truth(request, max_tokens)
    if "gives_kv" in more:
        return found[-1].kv_given.num_blocks
    return found[0].num_cached_tokens


def test_after_a_restart_a_prompt_loads_its_blocks_and_those_of_its_last_window():
    engine, tier = opened()
    assert ask(engine, prompt(41)) == 0
    assert (len(tier.stored), len(tier.windows)) == (11, 11)
    again, _ = opened(tier)
    assert ask(again, prompt(41)) == 40
    stats = again.stats()
    assert (stats.total_tier_loaded_blocks, stats.total_tier_loaded_windows) == (10, 2)
    assert (stats.total_block_hits, stats.total_window_hits, stats.total_windowless_tokens) == (10, 2, 0)
    assert again.stats().total_tier_saved_windows == 1, "the block that the answer filled"


@pytest.mark.parametrize(("lost", "found"), [((0, 1, 7), 40), ((9,), 36), ((8, 9), 32), ((7, 9), 28), (range(10), 0)])
def test_a_prompt_begins_behind_the_longest_prefix_whose_last_window_is_there(lost, found):
    engine, tier = opened()
    ask(engine, prompt(41), 1)
    keys = keys_of(Request("r", prompt(41), SamplingParams()))
    for index in lost:
        del tier.windows[keys[index]]
    again, _ = opened(tier)
    assert ask(again, prompt(41)) == found
    assert again.stats().total_tier_loaded_blocks == found // 4, "blocks without a window are of no use"


def test_where_not_all_may_be_saved_at_once_the_last_ones_are():
    engine, tier = opened(num_window_blocks=24)
    ask(engine, prompt(41), 1)
    assert len(tier.windows) == 24 // MAX_SAVING
    again, _ = opened(tier)
    assert ask(again, prompt(41)) == 40


def test_a_window_is_loaded_for_blocks_that_are_known_here():
    """The window's blocks of the first prompt are given up for another's."""
    engine, _ = opened(num_window_blocks=9, num_blocks=64)
    assert ask(engine, prompt(30), 1) == 0
    ask(engine, prompt(40, 100), 1)
    assert ask(engine, prompt(30), 1) == 28
    stats = engine.stats()
    assert (stats.total_tier_loaded_blocks, stats.total_tier_loaded_windows) == (0, 2)


def test_a_block_is_new_once():
    pool = WindowPool(3, REACH, 4)
    pool.allocate(2)
    assert [pool.publish(block, key) for block, key in ((0, b"a"), (1, b"a"), (1, b"b"))] == [True, False, True]
    assert (pool.take_fresh(), pool.take_fresh()) == ({0: b"a", 1: b"b"}, {})


def test_without_free_blocks_of_a_window_none_is_found():
    pool, seq = BlockPool(6, True, 0, Snapshots(0, 0, 4), WindowPool(2, REACH, 4)), Seq(0, list(prompt(11)), 11)
    seq.extend_hashes(4)
    pool.windows.allocate(1)
    transfers = Transfers(pool, 1.0)
    transfers.load([LoadStep(seq, (), tuple(seq.hashes), tuple(seq.hashes), 4, None, 2)], 0.0)
    transfers.fill(batch := Batch([], [], []))
    assert batch.loads[0].windows == WindowBlocks([], seq.hashes[:2], 0, 0, 1)
    transfers.finish([Moved(batch.loads[0].id, 0)], True)
    assert (seq.status, pool.num_free, pool.windows.num_free) == (Status.WAITING, 6, 1)


@pytest.mark.parametrize("position", [-4, 3, 8, 44, 10**9])
def test_a_position_that_cannot_be_is_none(position):
    engine, tier = opened()
    ask(engine, prompt(41), 1)
    again, other = opened(tier)
    other.reports = lambda moved: [Moved(each.id, min(each.num_blocks, 1), position) for each in moved]
    assert ask(again, prompt(41), 1) in (0, 4)
    again.check()


def test_a_prompt_for_another_engine_is_given_with_its_last_window():
    engine, tier = opened()
    tier.save_delay = 5
    assert ask(engine, prompt(41), 1, gives_kv=True) == 10
    keys = keys_of(Request("r", prompt(41), SamplingParams()))
    tier.windows = {key: tier.windows[key] for key in keys[8:10]}
    other, _ = opened(tier)
    assert ask(other, prompt(41)) == 40


def test_what_is_known_here_and_gone_from_the_tier_is_given_again():
    engine, tier = opened()
    ask(engine, prompt(41), 1)
    tier.stored.clear()
    tier.windows.clear()
    assert ask(engine, prompt(41), 1, gives_kv=True) == 10
    other, _ = opened(tier)
    assert ask(other, prompt(41)) == 40


def test_a_tier_that_takes_only_a_part_of_the_window_is_told_to_have_nothing():
    engine, tier = opened()
    tier.reports = lambda moved: [Moved(each.id, min(each.num_blocks, 1)) for each in moved]
    assert ask(engine, prompt(41), 1, gives_kv=True) == 0


@pytest.mark.parametrize("reach", range(1, 20))
def test_the_most_blocks_of_a_window_are_those_before_any_end(reach):
    ends = range(1, 12)
    assert most_in_window(reach, 4) == max(end - first_read(end * 4, reach, 4) for end in ends)
    assert [longest_prefix(end, reach, 4, lambda index: True) for end in ends] == list(ends)


class WindowTierMachine(TierMachine):
    """The same for a model with windows: what is in the tier may vanish, and requests go on from others' answers."""

    @initialize(reach=st.integers(1, 12), num_window_blocks=st.integers(7, 9), run_ahead=st.booleans())
    def make(self, reach: int, num_window_blocks: int, run_ahead: bool) -> None:
        self._open = lambda: self._opened(reach, num_window_blocks, run_ahead)
        self.tier = None
        self._open()

    def _opened(self, reach: int, num_window_blocks: int, run_ahead: bool) -> None:
        runner = windowed_runner(9, 4, 36, num_window_blocks, reach)
        before, fields = self.tier, {"max_batch": 3, "max_tokens_per_step": 9, "num_speculative_tokens": 0}
        self.engine, self.tier, self.clock = engine_over_tier(runner, run_ahead=run_ahead, **fields)
        if before is not None:
            self.tier.stored, self.tier.windows = before.stored, before.windows

    @precondition(lambda self: not self.engine.has_work)
    @rule()
    def start_again(self) -> None:
        self._open()

    @rule(data=st.data(), count=st.integers(1, 3))
    def lose(self, data: st.DataObject, count: int) -> None:
        kept = data.draw(st.sampled_from([self.tier.stored, self.tier.windows]))
        self.vanished |= kept.keys()
        for key in list(kept)[:count]:
            del kept[key]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), num_answer=st.integers(0, 20), more=st.lists(st.integers(1, 3), max_size=3))
    def go_on(self, data: st.DataObject, num_answer: int, more: list[int]) -> None:
        before = self.requests[data.draw(st.sampled_from(sorted(self.tokens)))]
        tokens = [*before.prompt_ids, *truth(before, num_answer), *more][:30]
        name = f"r{len(self.requests)}"
        self.requests[name] = Request(name, tuple(tokens), SamplingParams(seed=before.params.seed, max_tokens=5))
        self.engine.add(self.requests[name])

    def teardown(self) -> None:
        super().teardown()
        assert self.engine._pool.windows.num_free == self.engine._pool.windows.num_blocks


TestWindowTierMachine = WindowTierMachine.TestCase
