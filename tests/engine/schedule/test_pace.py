"""Pace: how many tokens of other prompts a step computes while a stream waits for its next token."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, repeat

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvloom.contract.config import EngineConfig, Limits
from kvloom.contract.errors import BadRequest
from kvloom.contract.messages import Batch
from kvloom.contract.request import Request
from kvloom.engine.schedule.blocks import BlockPool
from kvloom.engine.schedule.commit import apply_step, commit_step
from kvloom.engine.schedule.cost import load_of, pairs_of
from kvloom.engine.schedule.pace import FIRST_ALONE_TOKENS, FIRST_TOKENS, GAP_STEPS, LEAST_TOKENS, LONGEST_S, Pace
from kvloom.engine.schedule.scheduler import plan_step
from kvloom.engine.schedule.seq import Plan, Seq, SeqStep, Status
from tests.support.engine.crashes import ENGINES, GREEDY, MIXED, mortal_engine, run_through, said, truth
from tests.support.engine.crashes import prompt as prompt_ids
from tests.support.engine.engines import tokens_of
from tests.support.models.adapters import TINY_SHAPES, make_adapter

LIMITS = Limits(max_batch=64, max_tokens=2048, block_size=16)
STEP_S, TOKEN_S = 0.004, 0.001  # costs of the machine in these tests


def decoding(id: int = 1) -> Seq:
    return Seq(id, [1, 2, 3], 2, status=Status.RUNNING, num_computed=2)


def prompt(num_tokens: int = 4000, **fields: object) -> Seq:
    return Seq(100, [1] * num_tokens, num_tokens, **fields)


def seconds_of(plan: Plan) -> float:
    return STEP_S + TOKEN_S * load_of(plan).num_tokens


def taught(max_gap_s: float | None, step_timeout_s: float = 300.0) -> Pace:
    """A Pace that has learned the machine's costs."""
    pace, draw = Pace(max_gap_s, step_timeout_s), random.Random(0)
    for _ in range(200):
        steps = [SeqStep(decoding(), 2, 1, 0)] * draw.choice([1, 8])
        seq = prompt(num_computed=draw.randrange(2000))
        steps += draw.choice([[], [SeqStep(seq, seq.num_computed, draw.randrange(1, 400), 1)]])
        plan = Plan(tuple(steps))
        pace.learn(plan, seconds_of(plan))
    return pace


def budget(pace: Pace, *seqs: Seq, limits: Limits = LIMITS) -> int:
    return pace.limited(limits, seqs).prefill_tokens


def test_prompts_have_the_whole_budget_where_nobody_waits_for_a_token():
    for max_gap_s in (None, 0.0, 0.01):
        assert taught(max_gap_s).limited(LIMITS, [prompt(), prompt(status=Status.RUNNING)]) is LIMITS


def test_a_step_without_prompts_is_left_as_it_is():
    assert taught(0.01).limited(LIMITS, [decoding(), decoding(2)]) is LIMITS


@pytest.mark.parametrize(("max_gap_s", "num_tokens"), [(0.1, 80), (0.05, 32), (0.493, 480), (10.0, 2048), (0.0, 2048)])
def test_a_step_beside_a_stream_computes_the_tiles_that_fit_into_the_gap(max_gap_s, num_tokens):
    assert budget(taught(max_gap_s), decoding(), prompt()) == num_tokens


@pytest.mark.parametrize(("num_decoding", "num_tokens"), [(1, 16), (16, 32), (32, 64), (60, 128)])
def test_by_default_the_gap_is_three_steps_that_decode_what_decodes_now(num_decoding, num_tokens):
    pace, streams = taught(None), [decoding(i) for i in range(num_decoding)]
    assert pace.decode_s(streams) == pytest.approx(STEP_S + TOKEN_S * num_decoding, rel=0.1)
    found = budget(pace, *streams, prompt())
    assert found == num_tokens
    if num_tokens > LEAST_TOKENS:
        took_s = STEP_S + TOKEN_S * (num_decoding + found)
        assert took_s <= GAP_STEPS * (STEP_S + TOKEN_S * num_decoding) * 1.1


@pytest.mark.parametrize(
    ("num_waiting", "max_len", "num_tokens"), [(0, 0, 16), (31, 90, 96), (31, 40, 16), (400, 90, 192)]
)
def test_those_who_wait_to_stream_count_towards_the_gap_as_far_as_the_batch_takes_them(
    num_waiting, max_len, num_tokens
):
    """A burst of prompts is admitted before the first of its streams ends; pooled prompts never stream."""
    waiting = [prompt(40, max_len=max_len) for _ in range(num_waiting)]
    assert budget(taught(None), decoding(), *waiting, prompt()) == num_tokens


def test_a_gap_that_the_decodes_alone_exceed_leaves_prompts_the_least():
    assert budget(taught(0.001), decoding(), prompt()) == LEAST_TOKENS
    assert budget(taught(0.001), decoding(), prompt(5)) == LEAST_TOKENS


def test_the_configured_bound_holds_below_what_would_fit():
    small = Limits(max_batch=8, max_tokens=512, block_size=16, max_prefill_tokens=7)
    assert taught(10.0).limited(small, [decoding(), prompt()]) is small
    assert taught(0.001).limited(small, [decoding(), prompt()]) is small


def test_prompts_that_all_fit_leave_the_budget_to_whoever_comes_with_them():
    assert taught(0.1).limited(LIMITS, [decoding(), prompt(30), prompt(20)]) is LIMITS
    assert budget(taught(0.1), decoding(), prompt(30), prompt(20), prompt(60)) == 80


def test_those_in_prefill_come_before_those_that_wait():
    """Late in a long prompt each token attends to more keys, so fewer tokens fit."""
    pace = Pace(0.1)
    for start, count in [(0, 1), (0, 100), (3000, 100), (1000, 50), (0, 8)] * 20:
        plan = Plan((SeqStep(prompt(num_computed=start), start, count, 1),))
        pace.learn(plan, 0.001 * count + 0.001 * pairs_of(start, count) / 1000)
    deep = prompt(status=Status.RUNNING, num_computed=3000)
    assert (
        budget(pace, decoding(), deep)
        == budget(pace, decoding(), prompt(20), deep)
        < budget(pace, decoding(), prompt())
    )


def test_logits_of_every_token_of_a_prompt_are_counted():
    pace, draw = Pace(0.2), random.Random(1)
    for _ in range(100):
        seq, count = prompt(scored_from=draw.choice([None, 0])), draw.randrange(1, 300)
        pace.learn(Plan((SeqStep(seq, 0, count, 1),)), 0.001 * count * (1 + 3 * seq.is_scored))
    assert budget(pace, decoding(), prompt(scored_from=0)) == 48
    assert budget(pace, decoding(), prompt()) >= 176


def test_before_the_first_step_prompts_are_computed_in_small_steps():
    assert budget(Pace(), decoding(), prompt()) == FIRST_TOKENS
    assert budget(Pace(), prompt()) == FIRST_ALONE_TOKENS
    assert budget(Pace(0.0), decoding(), prompt()) == FIRST_ALONE_TOKENS
    assert Pace().token_s is None
    assert Pace().decode_s([decoding()]) == taught(None).decode_s([prompt()]) == 0.0


def test_a_step_that_the_rank_has_skipped_teaches_nothing():
    """A late mask gives no token: the row planned behind it takes no time, and rows do not cost nothing."""
    seq, pace = Seq(0, [1] * 5, 4, status=Status.RUNNING, num_computed=4, num_computing=2), Pace()
    pace.learn(Plan((SeqStep(seq, 4, 1, 0),)), 1.0)
    believed = pace.token_s
    pace.learn(Plan((SeqStep(seq, 5, 1, 0),)), 0.00001)
    assert pace.token_s == believed
    pace.learn(Plan((SeqStep(seq, 4, 1, 0),)), 0.00001)
    assert pace.token_s != believed


@pytest.mark.parametrize(("timeout_s", "longest_s"), [(300.0, LONGEST_S), (2.0, 0.5)])
@pytest.mark.parametrize("max_gap_s", [None, 0.0, 100.0])
def test_no_step_is_made_to_take_so_long_that_its_rank_counts_as_dead(timeout_s, longest_s, max_gap_s):
    pace = taught(max_gap_s, timeout_s)
    limits = Limits(max_batch=64, max_tokens=1_000_000, block_size=16)
    found = budget(pace, prompt(900_000), limits=limits)
    assert 0.8 * longest_s < TOKEN_S * found <= longest_s * 1.05


def test_a_gap_is_of_a_time_that_can_be():
    for wrong in (-0.001, 100.001, float("nan")):
        with pytest.raises(BadRequest, match="max_gap_s: must be between 0 and 100, got "):
            EngineConfig(backend="fake", max_gap_s=wrong)


# -- no starvation


MEASURED = st.lists(st.sampled_from([0.0, 1e-6, 0.001, 0.1, 5.0, 1e4]), max_size=40)


@settings(max_examples=40)
@given(MEASURED, st.sampled_from([None, 1e-5, 0.01]), st.integers(1, 300), st.integers(0, 63))
@example([1e4, 1e-6, 5.0], 1e-5, 300, 63)
def test_a_prompt_is_computed_in_so_many_steps_whatever_they_took(measured, max_gap_s, length, num_streams):
    pool, limits, pace = BlockPool(8192), Limits(max_batch=64, max_tokens=64, block_size=4), Pace(max_gap_s)
    streams = [Seq(i, [i, 1], 2) for i in range(num_streams)]
    seqs, times = [*streams], chain(measured, repeat(1.0))

    def step() -> None:
        plan = plan_step(seqs, pool, pace.limited(limits, seqs))
        apply_step(plan, pool)
        pace.learn(plan, next(times))
        done = [s.seq.id for s in plan.steps if s.start + s.num_tokens == len(s.seq.token_ids)]
        commit_step(plan, {id: [7] for id in done}, pool, 4)

    while any(seq.num_pending > 1 for seq in seqs):
        step()
    late = Seq(999, list(range(length)), length)
    seqs.append(late)
    room = min(LEAST_TOKENS, limits.max_tokens - num_streams)  # decodes get their tokens first
    for _ in range(-(-length // room)):
        step()
    assert late.num_computed >= length


# -- answers do not depend on the gap


def run_mixed(adapter: str, took: Callable[[Batch], float] | None = None, **fields: object) -> dict[str, object]:
    """What a client receives for each of MIXED, and for two requests of an adapter."""
    engine, executor = mortal_engine(**fields)
    executor.took = took
    id = engine.adapters.load(adapter).id
    tuned = [Request(f"tuned {i}", (*range(1, 20), i), GREEDY, adapter=id) for i in range(2)]
    return {id: said(deltas) for id, deltas in run_through(engine, executor, *MIXED, *tuned).items()}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_adapter(tmp_path_factory.mktemp("adapter"), TINY_SHAPES, 0))


@pytest.fixture(scope="module")
def undisturbed(adapter: str) -> dict[str, dict[str, object]]:
    return {name: run_mixed(adapter, **fields) for name, fields in ENGINES.items()}


@settings(max_examples=30)
@given(st.sampled_from(sorted(ENGINES)), MEASURED, st.sampled_from([None, 0.0, 1e-6, 0.05, 3.0]), st.booleans())
def test_answers_do_not_depend_on_the_gap(adapter, undisturbed, name, measured, max_gap_s, has_tier):
    """Requests are swapped, recomputed, drafted, ordered by policies, served from the cache or an outer tier, pooled,
    scored, or run with an adapter.
    """
    fields, times = dict(ENGINES[name]), chain(measured, repeat(0.01))
    if has_tier and fields.get("enable_prefix_cache", True):
        fields["stored"] = {}
    found = run_mixed(adapter, lambda batch: next(times), max_gap_s=max_gap_s, **fields)
    assert found == undisturbed[name]


@pytest.mark.parametrize(("max_gap_s", "most"), [(0.0, 256), (None, 48), (0.02, 16)])
def test_a_long_prompt_beside_streams_is_computed_in_steps_that_keep_the_gap(max_gap_s, most):
    engine, executor = mortal_engine(
        max_gap_s=max_gap_s, max_tokens_per_step=300, max_prefill_tokens=256, num_blocks=1024, max_seq_len=1100
    )
    executor.took = lambda batch: STEP_S + TOKEN_S * sum(work.num_tokens for work in batch.work)
    streams = [Request(f"stream {i}", (1, 2, 3, i), replace(GREEDY, max_tokens=90)) for i in range(20)]
    for request in streams:
        engine.add(request)
    deltas = [delta for _ in range(30) for delta in engine.step()]
    engine.add(Request("long", prompt_ids(1000, 5), GREEDY))
    while engine.has_work:
        deltas += engine.step()
    assert tokens_of([delta for delta in deltas if delta.request_id == "long"]) == truth(
        Request("long", prompt_ids(1000, 5), GREEDY), 9
    )
    beside = [batch for batch in executor.batches if {0, 20} <= {work.id for work in batch.work}]
    sizes = [work.num_tokens for batch in beside for work in batch.work if work.id == 20]
    assert max(sizes[2:]) == most, "of the first part it learns, behind which the second is planned by then"
