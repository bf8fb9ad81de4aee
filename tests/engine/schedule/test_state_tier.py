"""States in the outer KV tier: what is saved, what a new engine finds, and that a tier which lost, delays or refuses
anything costs computing, never an answer.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvloom.contract.messages import Batch, Moved
from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from kvloom.contract.states import MOST_SEARCHED, FoundState, Search, chain_hash
from kvloom.engine.engine import Engine
from kvloom.engine.schedule import prefix
from kvloom.engine.schedule.blocks import BlockPool
from kvloom.engine.schedule.keeping import Lies, Origin, add_state
from kvloom.engine.schedule.prefix import find_prefix
from kvloom.engine.schedule.seq import LoadStep, Seq, Status
from kvloom.engine.schedule.snapshots import Snapshots
from kvloom.engine.schedule.transfers import MAX_SAVING_STATES, Transfers
from tests.engine.rank.test_kvtier import TierMachine, truth
from tests.engine.schedule.test_snapshots import words
from tests.support.engine.engines import drain, run_all, tokens_of
from tests.support.engine.stateful import stateful_runner
from tests.support.engine.tiers import FakeTier, engine_over_tier

ANSWER = 50
NUMBERS = itertools.count()


def opened(block_size: int, before: FakeTier | None = None, **sizes: int) -> tuple[Engine, FakeTier]:
    """An engine over a model with states, and its tier, which has what the tier `before` has."""
    sizes = {"num_snapshots": 30, "num_blocks": 8000 // block_size, **sizes}
    runner = stateful_runner(4, block_size=block_size, max_seq_len=4000, **sizes)
    engine, tier, _ = engine_over_tier(runner, num_speculative_tokens=0)
    if before is not None:
        tier.stored, tier.states = before.stored, before.states
    return engine, tier


def ask(engine: Engine, tokens: Sequence[int], max_tokens: int = ANSWER) -> tuple[list[int], int]:
    """The answer, which is the model's, and how many tokens of the prompt were computed."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    request = Request(f"r{next(NUMBERS)}", tuple(tokens), params)
    found = run_all(engine, request)[request.id]
    assert tokens_of(found) == truth(request, max_tokens)
    return tokens_of(found), len(tokens) - found[0].num_cached_tokens


def script(engine: Engine) -> list[tuple[str, int, int]]:
    """Turns, a regenerated answer, a tool's loop and branches: (what, tokens of the prompt, tokens computed)."""
    found, shared = [], words(600, 0)

    def talk(what: str, tokens: list[int], max_tokens: int = ANSWER) -> list[int]:
        answer, num_computed = ask(engine, tokens, max_tokens)
        found.append((what, len(tokens), num_computed))
        return [*tokens, *answer]

    history = shared
    for turn in range(4):
        prompt = [*history, *words(40, 10 + turn)]
        history = talk("turn", prompt)
    talk("regenerated", prompt)
    for call in range(2):
        history = talk("tool", [*history, *words(150, 20 + call)], 12)
    for i in range(4):
        talk("branch", [*shared, 200 + i, *words(30, 30 + i)])
    return found


@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_after_a_restart_the_whole_script_computes_the_last_token_of_each_prompt(block_size):
    engine, tier = opened(block_size)
    before = script(engine)
    assert before[0] == ("turn", 640, 640)
    again, _ = opened(block_size, tier)
    assert [computed for _, _, computed in script(again)] == [1] * len(before)
    assert again.stats().total_tier_loaded_states > 0


def test_ends_of_prompts_and_of_answers_and_places_where_prompts_part_are_saved_and_no_regular_ones():
    engine, tier = opened(16)
    ask(engine, words(700, 0))
    assert sorted(size for _, size in tier.states) == [16 + 16 * 8] * 2, "neither lies at the end of a block"
    assert engine.stats().num_snapshots == 4, "the regular ones are for this engine alone"
    for i in range(3):
        ask(engine, [*words(700, 0)[:400], 200 + i, *words(30, i)], 5)
    assert len(tier.states) == 2 + 1 + 1 + 3 * 2, "and the regular one with which the first branch begins"
    assert engine.stats().total_tier_saved_states == len(tier.states)


def test_one_behind_a_full_block_has_no_contents_of_it():
    engine, tier = opened(16)
    ask(engine, words(33, 0), 1)
    assert [size for _, size in tier.states] == [16, 16 + 16 * 8], "before the last token, and behind it"
    again, _ = opened(16, tier)
    assert ask(again, words(33, 0), 1)[1] == 1


def test_a_regular_one_that_was_begun_with_is_saved():
    engine, tier = opened(16)
    ask(engine, words(700, 0), 1)
    count = len(tier.states)
    ask(engine, [*words(700, 0)[:520], 200, *words(3, 1)], 1)
    assert len(tier.states) == count + 2, "where it begins, and where it left the first one"


def test_what_this_engine_knows_is_not_loaded():
    engine, tier = opened(16)
    history = words(100, 0)
    for turn in range(3):
        answer, _ = ask(engine, history)
        history = [*history, *answer, *words(20, turn)]
    assert engine.stats().total_tier_loaded_states == 0
    asked = len(tier.loads)
    assert ask(engine, history[:-20])[1] == 1
    assert len(tier.loads) == asked, "all but the last token is known"


def test_a_state_that_was_given_up_here_is_found_there():
    engine, _ = opened(16)
    ask(engine, words(300, 0), 1)
    engine.reset_prefix_cache()
    assert ask(engine, words(300, 0), 1)[1] == 1
    assert engine.stats().total_tier_loaded_states == 1


def test_states_that_come_together_are_saved_a_few_at_a_time_and_none_is_left_out():
    engine, tier = opened(16)
    tier.save_delay, num_coming = 3, []
    for i in range(6):
        engine.add(Request(f"{i}", tuple(words(100, i)), SamplingParams(temperature=0, max_tokens=1)))
    while engine.has_work:
        engine.step()
        num_coming.append(len(tier.coming))
    assert max(num_coming) == MAX_SAVING_STATES
    assert engine.stats().num_saving_states == 0
    again, _ = opened(16, tier)
    assert [ask(again, words(100, i), 1)[1] for i in range(6)] == [1] * 6


@pytest.mark.parametrize("num_lost", [1, 3])
def test_a_state_behind_blocks_of_which_one_is_lost_is_not_used(num_lost):
    engine, tier = opened(16)
    ask(engine, words(100, 0))
    for key in list(tier.stored)[-num_lost - 3 :]:  # those behind the prompt's end were filled by the answer
        del tier.stored[key]
    again, tier = opened(16, tier)
    assert ask(again, words(100, 0))[1] in (1, 100)
    again.check()


def test_lost_states_and_lost_blocks_are_computed():
    engine, tier = opened(16)
    ask(engine, words(100, 0))
    stateless, empty = opened(16, tier)
    empty.states = {}
    assert ask(stateless, words(100, 0))[1] == 100
    assert empty.stored
    assert stateless.stats().total_tier_loaded_blocks == 0, "blocks without a state are of no use"
    blockless, other = opened(16, tier)
    other.states, other.stored = tier.states, {}
    assert ask(blockless, words(100, 0))[1] == 100


def test_one_that_is_waited_for_takes_the_place_of_one_that_is_worth_more():
    engine, tier = opened(16)
    ask(engine, words(100, 0), 1)
    again, tier = opened(16, tier, num_snapshots=1)
    ask(again, words(900, 1), 1)
    assert ask(again, words(100, 0), 1)[1] == 1
    assert again.stats().num_snapshots == 1


def test_where_all_room_is_for_states_on_their_way_one_is_found_and_forgotten():
    engine, tier = opened(16)
    ask(engine, words(100, 0), 1)
    again, tier = opened(16, tier, num_snapshots=1, num_blocks=32)
    again.add(Request("other", tuple(words(40, 1)), SamplingParams(temperature=0, max_tokens=2)))
    again.add(Request("late", tuple(words(100, 0)), SamplingParams(temperature=0, max_tokens=2)))
    found = drain(again)
    assert tier.found == {}
    assert {name: tokens_of(deltas) for name, deltas in found.items()}.keys() == {"other", "late"}


@pytest.mark.parametrize("position", [-5, 3, 99, 10**9])
def test_a_position_that_cannot_be_is_none(position):
    engine, tier = opened(16)
    ask(engine, words(100, 0), 1)
    again, other = opened(16, tier)
    other.reports = lambda moved: [type(one)(one.id, one.num_blocks, position or 0) for one in moved]
    if position == 99:
        other.stored = {}
    assert ask(again, words(100, 0), 1)[1] == 100


def test_blocks_and_tokens_within_one_name_a_state_and_the_longest_comes_first():
    tokens = words(10, 0)
    search = Search(3, 0, 0, [b"root", b"one", b"two"], tokens)
    found = list(search.candidates(2, 4))
    assert [position for position, _ in found] == [10, 9, 8, 7, 6, 5, 4, 3]
    assert dict(found)[6] == chain_hash(b"one", tokens[4:6])
    assert dict(found)[8] == chain_hash(b"one", tokens[4:8])
    assert [position for position, _ in search.candidates(1, 4)] == [7, 6, 5, 4, 3]
    behind = Search(6, 1, 1, [b"one", b"two"], tokens[4:])
    assert list(behind.candidates(2, 4)) == [one for one in found if one[0] >= 6]
    long = Search(1, 0, 0, [b""] * 2000, [0] * 8000)
    assert len(list(long.candidates(1000, 4))) == MOST_SEARCHED + 1


def searching(most: int = 2) -> tuple[Transfers, BlockPool, Seq, int]:
    """Transfers of which one searches a state of a prompt of 11 tokens in blocks of 4, and its id."""
    pool, seq = BlockPool(6, True, 0, Snapshots(1, most, 4)), Seq(0, words(11, 0), 11)
    seq.extend_hashes(4)
    transfers = Transfers(pool, 1.0)
    transfers.load([LoadStep(seq, (), tuple(seq.hashes), tuple(seq.hashes), 1)], 0.0)
    batch = Batch([], [], [])
    transfers.fill(batch)
    return transfers, pool, seq, batch.loads[0].id


def settled(transfers: Transfers, moved: Moved) -> FoundState:
    transfers.finish([moved], True)
    batch = Batch([], [], [])
    transfers.fill(batch)
    return batch.found[0]


def test_a_state_that_was_found_becomes_a_snapshot_with_a_block_of_its_own():
    transfers, pool, seq, id = searching()
    found = settled(transfers, Moved(id, 1, 6))
    (snapshot,) = pool.snapshots
    assert (snapshot.position, snapshot.place, snapshot.block) == (6, found.place, found.block)
    assert find_prefix(seq, pool, 4).start == 6
    assert (seq.status, pool.num_free) == (Status.WAITING, 6)


def test_where_all_room_is_for_states_on_their_way_it_is_forgotten():
    transfers, pool, seq, id = searching(most=1)
    assert pool.snapshots.make_room(5, None)
    assert settled(transfers, Moved(id, 2, 10)) == FoundState(id)
    assert seq.status is Status.WAITING


def test_where_no_block_is_free_for_its_tail_it_is_forgotten():
    transfers, pool, _, id = searching()
    pool.allocate(pool.num_free)
    assert settled(transfers, Moved(id, 2, 10)) == FoundState(id)
    pool.snapshots.check([])
    assert settled_places(pool) == 0


def test_one_that_is_known_meanwhile_is_forgotten():
    transfers, pool, seq, id = searching()
    assert pool.snapshots.make_room(8, None)
    (place,) = pool.states.allocate(1)
    add_state(seq, 8, Lies(place, 5), pool, Origin(None))
    assert settled(transfers, Moved(id, 2, 8)) == FoundState(id)
    assert settled_places(pool) == 1


def settled_places(pool: BlockPool) -> int:
    return pool.states.count - pool.states.num_free


class StateTierMachine(TierMachine):
    """The same for a model with states: what is in the tier may vanish, and requests go on from others' answers."""

    @initialize(num_snapshots=st.integers(1, 5), least=st.sampled_from([1, 3]), run_ahead=st.booleans())
    def make(self, num_snapshots: int, least: int, run_ahead: bool) -> None:
        self.least, prefix.LEAST_APART = prefix.LEAST_APART, least
        self._open = lambda: self._opened(num_snapshots, run_ahead)
        self.tier = None
        self._open()

    def _opened(self, num_snapshots: int, run_ahead: bool) -> None:
        runner = stateful_runner(3, num_snapshots, num_blocks=9, block_size=4, max_seq_len=36)
        before, fields = self.tier, {"max_batch": 3, "max_tokens_per_step": 9, "num_speculative_tokens": 0}
        self.engine, self.tier, self.clock = engine_over_tier(runner, run_ahead=run_ahead, **fields)
        if before is not None:
            self.tier.stored, self.tier.states = before.stored, before.states

    @precondition(lambda self: not self.engine.has_work)
    @rule()
    def start_again(self) -> None:
        self._open()

    @rule(data=st.data(), count=st.integers(1, 3))
    def lose(self, data: st.DataObject, count: int) -> None:
        kept: dict[Any, Any] = data.draw(st.sampled_from([self.tier.stored, self.tier.states]))
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
        prefix.LEAST_APART = self.least
        super().teardown()


TestStateTierMachine = StateTierMachine.TestCase
