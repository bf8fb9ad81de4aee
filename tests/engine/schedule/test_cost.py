"""The cost of a step, learned from measured steps: exact where it is a sum of its parts, robust against outliers."""

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvloom.engine.schedule.cost import Load, StepCost, decode_load, load_of, pairs_of
from kvloom.engine.schedule.seq import Plan, Seq, SeqStep, Status

PARTS = (0.003, 0.0003, 0.0002, 0.00016)  # coefficients of a small model on two cores
PARTS_DRAWN = st.tuples(
    st.floats(1e-4, 0.1), st.floats(1e-4, 0.01), st.floats(0, 0.01), st.floats(0, 0.001), st.integers(0, 99)
)


def seconds_of(load: Load, parts: tuple[float, ...] = PARTS) -> float:
    return sum(part * amount for part, amount in zip(parts, load.amounts(), strict=True))


def loads(draw: random.Random, count: int) -> list[Load]:
    """Steps of a busy server: decodes of some sequences, and a chunk of a prompt in every third."""
    found = []
    for _ in range(count):
        num_decoding, chunk = draw.choice([1, 4, 32]), draw.choice([0, 0, draw.randrange(1, 512)])
        pairs = num_decoding * draw.randrange(1, 900) + pairs_of(draw.randrange(2000), chunk)
        found.append(Load(num_decoding + chunk, num_decoding + bool(chunk), pairs))
    return found


def taught(steps: list[tuple[Load, float]]) -> StepCost:
    cost = StepCost()
    for load, seconds in steps:
        cost.learn(load, seconds)
    return cost


def prompt(num_tokens: int = 400, **fields: object) -> Seq:
    return Seq(2, [1] * num_tokens, num_tokens, **fields)


# -- loads


def test_a_load_counts_tokens_wanted_logits_and_pairs():
    decoding = Seq(0, [1, 2, 3], 2, status=Status.RUNNING, num_computed=2)
    guessing = SeqStep(decoding, 2, 3, 0, draft=(7, 8))
    assert load_of(Plan((SeqStep(decoding, 2, 1, 0),))) == Load(1, 1, 3)
    assert load_of(Plan((guessing,))) == Load(3, 3, 3 + 4 + 5)
    half, rest = SeqStep(prompt(8), 0, 4, 1), SeqStep(prompt(8), 4, 4, 1)
    assert load_of(Plan((half,))) == Load(4, 0, 1 + 2 + 3 + 4)
    assert load_of(Plan((rest,))) == Load(4, 1, 5 + 6 + 7 + 8)
    assert load_of(Plan((half, rest))) == Load(8, 1, 36)
    assert load_of(Plan((SeqStep(prompt(8, scored_from=0), 0, 4, 1),))) == Load(4, 4, 10)
    of_its_end = prompt(8, scored_from=6)
    assert load_of(Plan((SeqStep(of_its_end, 0, 4, 1),))) == Load(4, 0, 10)
    assert load_of(Plan((SeqStep(of_its_end, 2, 5, 1),))) == Load(5, 2, 3 + 4 + 5 + 6 + 7)
    assert load_of(Plan((SeqStep(of_its_end, 4, 4, 1),))) == Load(4, 3, 5 + 6 + 7 + 8)


def test_the_load_of_decodes_is_that_of_the_step_that_computes_them():
    seqs = [Seq(i, [1] * (3 + i), 2, status=Status.RUNNING, num_computed=2 + i) for i in range(3)]
    steps = tuple(SeqStep(seq, seq.num_computed, 1, 0) for seq in seqs)
    assert decode_load(seqs, 8) == load_of(Plan(steps))
    seqs[0].draft = [5] * 6
    assert decode_load(seqs, 4) == load_of(Plan(steps))._replace(num_tokens=7, num_samples=7)


# -- learning


def test_nothing_is_known_before_the_first_step_and_a_step_without_tokens_teaches_nothing():
    cost = StepCost()
    cost.learn(Load(0, 0, 0), 1.0)
    assert not cost.is_known
    assert cost.token_s is None
    cost.learn(Load(8, 1, 36), 0.5)
    assert cost.step_s(Load(8, 1, 36)) == pytest.approx(0.5)


@settings(max_examples=20, derandomize=True)
@given(PARTS_DRAWN)
@example((*PARTS, 1))
@example((0.01, 0.0, 0.0, 0.0, 1))
@example((1e-5, 0.01, 0.0, 0.001, 3))
def test_what_a_step_costs_is_found_where_it_is_a_sum_of_its_parts(drawn):
    *parts, seed = drawn
    draw = random.Random(seed)
    cost = taught([(load, seconds_of(load, tuple(parts))) for load in loads(draw, 300)])
    asked = [(load, seconds_of(load, tuple(parts))) for load in loads(draw, 20)]
    errors = sorted(abs(cost.step_s(load) / seconds - 1) for load, seconds in asked)
    assert errors[10] < 0.1
    assert errors[-1] < 0.75  # loads unlike those it learned from


def noisy(draw: random.Random, count: int) -> list[tuple[Load, float]]:
    """Steps with noise: one in ten takes up to thirty times as long, the others vary by a tenth."""

    def disturbance() -> float:
        return draw.uniform(1.5, 30) if draw.random() < 0.1 else draw.uniform(0.9, 1.1)

    return [(load, seconds_of(load) * disturbance()) for load in loads(draw, count)]


@pytest.mark.parametrize("seed", range(4))
def test_disturbed_steps_move_it_little(seed):
    draw = random.Random(seed)
    cost = taught(noisy(draw, 400))
    errors = []
    for load, seconds in noisy(draw, 400):
        errors.append(abs(cost.step_s(load) / seconds_of(load) - 1))
        cost.learn(load, seconds)
    assert sorted(errors)[len(errors) // 2] < 0.1
    assert max(errors) < 0.5


@pytest.mark.parametrize("times", [100, 10, 0.1, 0.01])
def test_one_step_that_is_far_off_moves_it_by_a_fraction(times):
    cost = taught([(load, seconds_of(load)) for load in loads(random.Random(5), 300)])
    load = Load(96, 33, 20_000)
    cost.learn(load, times * seconds_of(load))
    assert cost.step_s(load) == pytest.approx(seconds_of(load), rel=0.25)


@pytest.mark.parametrize("times", [10, 2, 0.5, 0.1])
def test_another_speed_of_the_machine_is_learned_in_some_steps(times):
    draw = random.Random(6)
    cost = taught([(load, seconds_of(load)) for load in loads(draw, 300)])
    for load in loads(draw, 100):
        cost.learn(load, times * seconds_of(load))
    for load in loads(draw, 20):
        assert cost.step_s(load) == pytest.approx(times * seconds_of(load), rel=0.15)


@pytest.mark.parametrize(("first_s", "then_s"), [(0.0003, 0.006), (0.006, 0.0003)])
@pytest.mark.parametrize("num_rows", [(1, 6), (1, 3, 9)])
def test_a_row_that_is_believed_too_cheap_is_learned_as_soon_as_one_too_dear(first_s, then_s, num_rows):
    draw = random.Random(9)

    def step(row_s: float, *counts: int) -> tuple[Load, float]:
        count = draw.choice(counts)
        return Load(count, count, 300 * count), (0.02 + row_s * count) * draw.uniform(0.95, 1.05)

    cost = taught([step(first_s, 1, 2, 6) for _ in range(100)])
    for _ in range(70):
        cost.learn(*step(then_s, *num_rows))
    assert cost.step_s(Load(6, 6, 1800)) == pytest.approx(0.02 + 6 * then_s, rel=0.2)
    assert cost.row_s(Seq(0, [1] * 300, 300)) == pytest.approx(then_s, rel=0.4, abs=0.001)


def test_decodes_alone_do_not_wash_out_what_a_prompt_costs():
    draw = random.Random(7)
    cost = taught([(load, seconds_of(load)) for load in loads(draw, 200)])
    for _ in range(5000):
        load = Load(8, 8, 8 * draw.randrange(1, 900))
        cost.learn(load, seconds_of(load) * draw.uniform(0.9, 1.1))
    assert cost.token_s == pytest.approx(PARTS[1], rel=0.3)


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 64), st.floats(1e-6, 1e4)), min_size=1, max_size=60))
@example([(1, 1, 1.0), (512, 1, 0.001), (1, 1, 1000.0), (1, 0, 1e-6)])
def test_whatever_was_measured_a_step_takes_time_and_more_of_it_takes_no_less(steps):
    cost = taught([(Load(tokens, samples, pairs_of(0, tokens)), seconds) for tokens, samples, seconds in steps])
    assert 0 < cost.step_s(Load(1, 1, 1)) <= cost.step_s(Load(100, 1, 100)) <= cost.step_s(Load(100, 9, 10_000))


# -- what fits


FITTING = st.tuples(st.integers(2, 5000), st.floats(0, 1), st.floats(0, 1e-3), st.booleans(), st.floats(1e-5, 100))


@given(FITTING)
@example((400, 0.5, 0.0, True, 0.01))
@example((400, 0.0, 0.0, False, 100.0))
def test_so_many_tokens_fit_and_not_one_more(drawn):
    length, computed, kilopair_s, is_scored, room_s = drawn
    seq = prompt(length, num_computed=int(computed * (length - 2)), scored_from=0 if is_scored else None)
    cost = taught([(load, seconds_of(load, (*PARTS[:3], kilopair_s))) for load in loads(random.Random(8), 60)])
    count = cost.num_fitting(seq, room_s)
    assert 0 <= count <= seq.num_pending
    assert cost.prompt_s(seq, count) <= room_s * 1.001
    assert count == seq.num_pending or cost.prompt_s(seq, count + 1) > room_s * 0.999


def test_nothing_fits_where_there_is_no_room_and_everything_where_tokens_cost_nothing():
    cost = taught([(Load(1, 1, 1), 0.01), *((Load(n, 1, pairs_of(0, n)), 0.01) for n in range(1, 300))])
    assert cost.num_fitting(prompt(), 0.0) == 0
    assert cost.num_fitting(prompt(), -1.0) == 0
    assert cost.num_fitting(prompt(), 10.0) == 400
