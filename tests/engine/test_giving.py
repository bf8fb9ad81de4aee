"""Prompts computed for another engine: the answer comes once their blocks are in the outer tier, and says how many."""

import pytest

from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import BadRequest
from kvloom.contract.messages import Moved, RankInfo
from kvloom.contract.request import Delta, FinishReason, KvLocation, Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.engine import Engine
from kvloom.engine.giving import check_giving
from kvloom.rank.fake import ByteTokenizer, fake_answer
from tests.engine.rank.test_kvtier import answer, keys_of, prompt
from tests.support.engine.crashes import at_steps, mortal_engine, step
from tests.support.engine.engines import fake_runner, in_process, run_all
from tests.support.engine.stateful import stateful_runner
from tests.support.engine.tiers import FakeTier, engine_over_tier, tiered_engine

ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
GIVEN = Request("given", prompt(30), ONE, gives_kv=True)  # 7 blocks of 4 tokens, and 2 tokens more


def last_delta(engine: Engine, request: Request) -> Delta:
    return run_all(engine, request)[request.id][-1]


def num_given(delta: Delta) -> int:
    assert delta.kv_given is not None
    return delta.kv_given.num_blocks


def test_the_answer_comes_when_the_blocks_are_there_and_another_engine_takes_them_up():
    engine, tier, _ = tiered_engine()
    tier.save_delay = 5
    engine.add(GIVEN)
    while not (deltas := engine.step()):
        pass
    assert set(keys_of(GIVEN)) <= tier.stored.keys()
    assert (num_given(deltas[0]), deltas[0].finish_reason) == (7, FinishReason.LENGTH)
    assert deltas[0].token_ids == tuple(fake_answer(GIVEN.prompt_ids, ONE, 0, 1))
    assert not engine.has_work
    engine.check()
    other, _, _ = tiered_engine(tier.stored)
    longer = Request("b", GIVEN.prompt_ids, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert answer(other, longer) == (fake_answer(GIVEN.prompt_ids, longer.params, 0, 8), 28)


@pytest.mark.parametrize("fields", [{}, {"max_tokens_per_step": 5, "max_batch": 2}, {"num_speculative_tokens": 2}])
def test_all_of_it_is_given_though_saves_may_hold_a_quarter_of_the_blocks(fields):
    engine, tier, _ = tiered_engine(None, 9, **fields)
    assert num_given(last_delta(engine, GIVEN)) == 7
    assert set(keys_of(GIVEN)) <= tier.stored.keys()


def test_what_is_cached_here_and_gone_from_the_tier_is_given_again():
    engine, tier, _ = tiered_engine()
    assert num_given(last_delta(engine, GIVEN)) == 7
    tier.stored.clear()
    again = last_delta(engine, Request("again", GIVEN.prompt_ids, ONE, gives_kv=True))
    assert (num_given(again), again.num_cached_tokens) == (7, 29)
    assert set(keys_of(GIVEN)) <= tier.stored.keys()


def test_a_prompt_of_less_than_a_block_gives_nothing_and_is_answered():
    engine, _, _ = tiered_engine()
    assert num_given(last_delta(engine, Request("short", prompt(3), ONE, gives_kv=True))) == 0


@pytest.mark.parametrize(("moved", "given"), [(0, 0), (3, 3), (7, 7)])
def test_a_tier_that_takes_less_is_believed(moved: int, given: int):
    engine, tier, _ = tiered_engine()
    tier.reports = lambda reports: [Moved(each.id, min(each.num_blocks, moved)) for each in reports]
    assert num_given(last_delta(engine, GIVEN)) == given


def test_a_gap_ends_what_is_given():
    engine, tier, _ = tiered_engine(max_tokens_per_step=8, max_batch=2)  # two blocks per step
    seen: list[int] = []  # ids of transfers; the first is the load, which finds nothing

    def fail_the_second(reports: list[Moved]) -> list[Moved]:
        seen.extend(each.id for each in reports)
        return [Moved(each.id, 0 if seen.index(each.id) == 2 else each.num_blocks) for each in reports]

    tier.reports = fail_the_second
    assert num_given(last_delta(engine, GIVEN)) == 2


def test_an_abort_while_its_blocks_are_on_their_way_ends_it_once():
    engine, tier, _ = tiered_engine()
    tier.save_delay = 50
    engine.add(GIVEN)
    for _ in range(5):
        assert engine.step() == []
    engine.abort(GIVEN.id)
    deltas = [delta for _ in range(80) for delta in engine.step()]
    assert [delta.finish_reason for delta in deltas] == [FinishReason.ABORT]
    assert not engine.has_work
    engine.check()


def test_a_rank_that_dies_while_it_computes_the_prompt_is_followed_by_one_that_gives_all_of_it():
    stored: dict[bytes, list[int]] = {}
    engine, executor = mortal_engine(at_steps({3}), stored, max_tokens_per_step=10, max_batch=2)
    engine.add(GIVEN)
    told: list[Delta] = []
    while engine.has_work:
        told += step(engine, executor)
    assert engine.stats().total_crashes == 1
    assert [num_given(delta) for delta in told] == [7]
    assert set(keys_of(GIVEN)) <= stored.keys()


def test_an_engine_that_fails_ends_it_once():
    engine, tier, _ = tiered_engine()
    tier.save_delay = 50
    engine.add(GIVEN)
    for _ in range(5):
        engine.step()
    assert [delta.finish_reason for delta in engine.fail_all("broken")] == [FinishReason.ERROR]
    engine.reset()
    assert engine.step() == []


def test_without_a_tier_it_is_refused():
    runner = fake_runner(64, 4, 64)
    config = EngineConfig(backend="fake")
    engine = Engine(config, in_process(runner, config), ByteTokenizer())
    location = KvLocation("p", "m", "l", 4)
    for request in (GIVEN, Request("taken", prompt(9), ONE, kv_location=location)):
        with pytest.raises(BadRequest, match="kv_transfer_params: needs a KV pool"):
            engine.add(request)


OWN = RankInfo(64, 16, 100, 100, "cpu", kv_model="m1", kv_layout="cpu-x1")


@pytest.mark.parametrize(
    ("location", "problem"),
    [
        (KvLocation("p2", "m1", "cpu-x1", 16), "kv_pool.pool: the blocks are of pool 'p2', this server has 'p1'"),
        (KvLocation("p1", "m2", "cpu-x1", 16), "kv_pool.model: the blocks are of model 'm2', this server has 'm1'"),
        (KvLocation("p1", "m1", "gpu-x1", 16), "kv_pool.layout: the blocks are of layout 'gpu-x1', this server has"),
        (
            KvLocation("p1", "m1", "cpu-x1", 32),
            "kv_pool.block_size: the blocks are of block_size 32, this server has 16",
        ),
    ],
)
def test_blocks_that_are_not_this_engines_are_refused_by_name(location: KvLocation, problem: str):
    with pytest.raises(BadRequest, match=problem):
        check_giving(Request("a", prompt(20), ONE, kv_location=location), OWN, "p1")


def test_a_pool_that_is_not_known_yet_refuses_nobody():
    check_giving(Request("a", prompt(20), ONE, kv_location=KvLocation("p2", "m1", "cpu-x1", 16)), OWN, "")


def stateful(
    before: FakeTier | None = None, num_snapshots: int = 8, block_size: int = 4, **fields: object
) -> tuple[Engine, FakeTier]:
    """An engine over a model with states, and its tier, which has what the tier `before` has."""
    runner = stateful_runner(4, num_snapshots, num_blocks=64, block_size=block_size, max_seq_len=64)
    engine, tier, _ = engine_over_tier(runner, num_speculative_tokens=0, **fields)
    if before is not None:
        tier.stored, tier.states = before.stored, before.states
    return engine, tier


@pytest.mark.parametrize(("block_size", "given"), [(4, 7), (16, 1), (32, 0)])
def test_where_layers_keep_states_that_before_the_last_token_is_given_with_its_block(block_size: int, given: int):
    engine, tier = stateful(block_size=block_size)
    tier.save_delay = 5
    engine.add(GIVEN)
    while not (deltas := engine.step()):
        pass
    assert len(tier.states) >= 1
    assert (num_given(deltas[0]), deltas[0].finish_reason) == (given, FinishReason.LENGTH)
    engine.check()
    other, _ = stateful(tier, block_size=block_size)
    longer = Request("b", GIVEN.prompt_ids, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert answer(other, longer) == (fake_answer(GIVEN.prompt_ids, longer.params, 0, 8), 29)
    assert other.stats().total_tier_loaded_states == 1


def test_a_state_that_is_known_here_and_gone_from_the_tier_is_given_again():
    engine, tier = stateful()
    assert num_given(last_delta(engine, GIVEN)) == 7
    tier.stored.clear()
    tier.states.clear()
    again = last_delta(engine, Request("again", GIVEN.prompt_ids, ONE, gives_kv=True))
    assert (num_given(again), again.num_cached_tokens) == (7, 29)
    other, _ = stateful(tier)
    assert answer(other, Request("b", GIVEN.prompt_ids, ONE))[1] == 29


def test_a_state_that_another_engine_waits_for_is_taken_though_others_are_worth_more():
    engine, tier = stateful(num_snapshots=1)
    last_delta(engine, Request("long", prompt(60, 7), ONE))
    assert num_given(last_delta(engine, Request("short", prompt(20), ONE, gives_kv=True))) == 4
    other, _ = stateful(tier)
    assert answer(other, Request("b", prompt(20), ONE))[1] == 19


def test_a_prompt_that_is_too_short_for_a_state_gives_nothing_and_is_answered():
    engine, _ = stateful()
    assert num_given(last_delta(engine, Request("short", prompt(12), ONE, gives_kv=True))) == 0


@pytest.mark.parametrize("what", ["blocks", "states"])
def test_a_tier_that_takes_only_a_part_of_it_is_told_to_have_nothing(what: str):
    engine, tier = stateful()
    is_state = {"states": True, "blocks": False}[what]

    def report(moved: list[Moved]) -> list[Moved]:
        return [Moved(each.id, 0 if (each.id in tier.was_state) == is_state else each.num_blocks) for each in moved]

    tier.reports = report
    assert num_given(last_delta(engine, GIVEN)) == 0


@pytest.mark.parametrize("opened", [lambda: tiered_engine()[:2], stateful], ids=["blocks", "a state"])
def test_a_rank_that_dies_meanwhile_ends_the_wait_and_not_the_answer(opened):
    engine, tier = opened()
    tier.save_delay = 50
    engine.add(GIVEN)
    for _ in range(5):
        assert engine.step() == []
    deltas = engine.suspend() + engine.resume({})
    assert [(delta.finish_reason, num_given(delta)) for delta in deltas] == [(FinishReason.LENGTH, 0)]
    assert not engine.has_work


def test_a_prompt_that_is_computed_again_gives_its_state_again():
    engine, tier = stateful(max_tokens_per_step=10, max_batch=2)
    engine.add(GIVEN)
    deltas = [delta for _ in range(3) for delta in engine.step()] + engine.suspend()
    engine._executor = stateful(tier)[0]._executor
    deltas += engine.resume({})
    while engine.has_work:
        deltas += engine.step()
    assert [num_given(delta) for delta in deltas] == [7]
    other, _ = stateful(tier)
    assert answer(other, Request("b", GIVEN.prompt_ids, ONE))[1] == 29
