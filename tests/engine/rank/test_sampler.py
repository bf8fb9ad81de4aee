"""Sampler: the effect of each rule, measured on distributions small enough to compute the result by hand."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.contract.sampling import GREEDY_BELOW, SamplingParams
from kvloom.rank import sampler
from kvloom.rank.kernels.backend import most_likely
from kvloom.rank.sampler import History, choice_of, log_softmax, num_candidates, sample, sample_top, uniforms

EOS = [0]


def history(
    params: SamplingParams, tokens: tuple[int, ...] = (1,), num_prompt: int | None = None, seed: int = 0
) -> History:
    row = History(list(tokens[:num_prompt]), len(tokens[:num_prompt]), params, seed)
    for token in tokens[len(row.token_ids) :]:
        row.append(token)
    return row


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def normal(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count, np.float32)


def draw(probs: list[float], params: SamplingParams, count: int = 400, **fields: object) -> Counter[int]:
    """How often each token of a distribution is drawn with `count` different seeds."""
    rows = [history(params, seed=seed, **fields) for seed in range(count)]
    logits = np.log(floats(*probs))
    return Counter(sample(logits.copy(), row, EOS)[0] for row in rows)


def test_greedy_takes_the_most_likely_token():
    logits = [floats(0, 3, 2), floats(5, 3, 2)]
    rows = [history(SamplingParams(temperature=0)), history(SamplingParams(top_k=1))]
    assert [sample(logits[i], row, EOS)[0] for i, row in enumerate(rows)] == [1, 0]


def test_draws_follow_the_distribution():
    counts = draw([0.5, 0.3, 0.2], SamplingParams(), count=3000)
    for token, share in enumerate((0.5, 0.3, 0.2)):
        assert abs(counts[token] / 3000 - share) < 4 * math.sqrt(share * (1 - share) / 3000)


def test_temperature_sharpens_and_flattens():
    cold = draw([0.6, 0.4], SamplingParams(temperature=0.1))
    hot = draw([0.9, 0.1], SamplingParams(temperature=50.0))
    assert cold[0] > 380
    assert 150 < hot[1] < 250


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=2), {1, 2}),
        (SamplingParams(top_k=100), {0, 1, 2, 3}),
        (SamplingParams(top_p=0.5), {1, 2}),
        (SamplingParams(top_p=0.39), {1}),
        (SamplingParams(top_p=0.71), {1, 2, 3}),
        (SamplingParams(min_p=0.6), {1, 2}),
        (SamplingParams(top_k=3, top_p=0.5), {1, 2}),
        (SamplingParams(typical_p=0.25), {2}),
        (SamplingParams(logit_bias={1: -100.0, 2: -100.0}), {0, 3}),
        (SamplingParams(min_tokens=1, top_k=4), {1, 2, 3}),
        (SamplingParams(min_tokens=1, stop_token_ids=(3,)), {1, 2}),
    ],
)
def test_a_rule_leaves_exactly_these_tokens(params, kept):
    probs = [0.1, 0.4, 0.3, 0.2]
    assert set(draw(probs, params)) == kept


LEAST = (5e-324, 1e-46, 1e-40, 1e-30)  # the smallest float64, one below float32's range, one that kernels flush to zero


@settings(max_examples=400)
@given(
    st.builds(
        SamplingParams,
        temperature=st.sampled_from([*LEAST, GREEDY_BELOW, 1.0, 100.0]),
        top_k=st.sampled_from([0, 1, 2, 2**31 - 1]),
        top_p=st.sampled_from([*LEAST, 1.0]),
        typical_p=st.sampled_from([*LEAST, 1.0]),
        min_p=st.sampled_from([0.0, *LEAST, 1.0]),
        repetition_penalty=st.sampled_from([*LEAST, 1.0, 100.0]),
        frequency_penalty=st.sampled_from([-2.0, 0.0, 2.0]),
        presence_penalty=st.sampled_from([-2.0, 0.0, 2.0]),
    ),
    st.lists(st.integers(0, 4), min_size=1, max_size=9),
    st.integers(0, 100),
)
def test_at_the_ends_of_their_ranges_rules_leave_a_token_that_can_come(params, tokens, seed):
    row = history(params, tuple(tokens), 1, seed)
    logits = floats(3, -np.inf, 0, -2, 7)
    assert sample(logits.copy(), row, EOS)[0] in (0, 2, 3, 4)
    if params.repetition_penalty == 1 and not (params.frequency_penalty or params.presence_penalty):
        is_likeliest = min(params.temperature, params.top_p) < 1e-3
        assert sample(logits.copy(), row, EOS)[0] == 4 or not is_likeliest or params.typical_p < 1


def test_a_temperature_so_low_that_its_quotients_are_no_numbers_is_greedy():
    assert [SamplingParams(temperature=t).is_greedy for t in (0.0, *LEAST, 9e-6, GREEDY_BELOW)] == [True] * 6 + [False]


def test_top_p_over_a_large_flat_vocabulary_looks_beyond_the_first_candidates():
    probs = [1 / 4096] * 4096
    assert len(draw(probs, SamplingParams(top_p=0.9), count=300)) > 250
    assert len(draw(probs, SamplingParams(min_p=0.5), count=300)) > 250
    assert len(draw(probs, SamplingParams(typical_p=0.9), count=300)) > 250


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 6.0])  # scale of the logits: all equal, flat, like a model's, sharp
@pytest.mark.parametrize("mass", [1e-40, 0.2, 0.7, 0.999])
def test_typical_tokens_are_the_same_however_many_are_looked_at_first(scale, mass, monkeypatch):
    logits = np.round(normal(3000, 4), 1) * np.float32(scale)  # many are equal
    drawn = []
    for count in (1, 16, 1024, 3000):
        monkeypatch.setattr(sampler, "_NUM_CANDIDATES", count)
        rows = [history(SamplingParams(typical_p=mass), seed=seed) for seed in range(40)]
        drawn.append([sample(logits.copy(), row, EOS)[0] for row in rows])
    assert drawn == [drawn[0]] * 4


def test_repetition_penalty_counts_prompt_and_answer_and_pushes_either_sign_down():
    row = history(SamplingParams(temperature=0, repetition_penalty=2.0), (0,))
    assert sample(floats(2, 1.5, -1), row, EOS)[0] == 1
    assert sample(floats(-1, -1.5, -9), row, EOS)[0] == 1


def test_frequency_and_presence_penalties_count_the_answer_only():
    logits = floats(1, 0.8)
    prompt_only = history(SamplingParams(temperature=0, frequency_penalty=1.0), (0, 0, 0))
    answered = history(SamplingParams(temperature=0, frequency_penalty=1.0), (1, 0), num_prompt=1)
    present = history(SamplingParams(temperature=0, presence_penalty=0.3), (1, 0), num_prompt=1)
    assert [sample(logits.copy(), row, EOS)[0] for row in (prompt_only, answered, present)] == [0, 1, 1]


def test_a_presence_penalty_is_taken_once_however_often_a_token_came():
    often = (1, 0, 0, 0)
    present = history(SamplingParams(temperature=0, presence_penalty=0.3), often, num_prompt=1)
    frequent = history(SamplingParams(temperature=0, frequency_penalty=0.3), often, num_prompt=1)
    assert [sample(floats(1, 0.5), row, EOS)[0] for row in (present, frequent)] == [0, 1]


def test_a_watermark_favours_the_same_half_of_the_vocabulary_after_the_same_token():
    flat = [1 / 64] * 64
    marked = draw(flat, SamplingParams(watermark=True), count=2000, tokens=(5,))
    favoured = {token for token, count in marked.items() if count > 2000 / 64}
    assert 26 <= len(favoured) <= 34  # half of the 64 tokens
    assert sum(marked[token] for token in favoured) > 1600  # odds of e^2 : 1
    assert draw(flat, SamplingParams(watermark=True), count=2000, tokens=(6,)) != marked


def test_log_probabilities_are_of_the_raw_distribution():
    probs = [0.1, 0.6, 0.3]
    params = SamplingParams(temperature=0, logit_bias={1: -100.0}, logprobs=2)
    token, logprob = sample(np.log(floats(*probs)), history(params), EOS)
    assert token == 2
    assert logprob is not None
    assert math.isclose(logprob.logprob, math.log(0.3), rel_tol=1e-5)
    assert [i for i, _ in logprob.top] == [1, 2]


@settings(deadline=None, max_examples=30)
@given(
    st.lists(
        st.sampled_from(
            [
                SamplingParams(temperature=0),
                SamplingParams(temperature=0.8, top_p=0.9),
                SamplingParams(top_k=5, min_p=0.01),
                SamplingParams(typical_p=0.9, repetition_penalty=1.3),
                SamplingParams(frequency_penalty=0.5, logprobs=3),
            ]
        ),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 100),
)
def test_a_row_does_not_depend_on_the_other_rows(params, seed):
    logits = [3 * normal(3000, seed + i) for i in range(len(params))]
    alone = [sample(logits[i].copy(), history(p, (4, 5), 1, seed=i), EOS) for i, p in enumerate(params)]
    together = [sample(logits[i], history(p, (4, 5), 1, seed=i), EOS) for i, p in enumerate(params)]
    assert together == alone


def test_randomness_is_a_function_of_seed_and_position():
    assert uniforms(3, 7) == uniforms(3, 7)
    assert len({number for seed in (-1, 0, 1, 2**63) for number in uniforms(seed, 0, 50)}) == 200
    assert all(0 <= number < 1 for number in uniforms(0, 0, 100))


@given(st.integers(-(2**63), 2**64), st.integers(0, 2**32), st.integers(1, 70))
def test_a_random_number_is_that_of_a_fresh_philox_whatever_is_made_with_it(seed, position, count):
    alone = [
        float(np.random.Generator(np.random.Philox(key=seed % 2**64, counter=at)).random())
        for at in range(position, position + count)
    ]
    assert uniforms(seed, position, count) == alone


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(top_k=2), SamplingParams(typical_p=0.999)], ids=str
)
def test_a_draw_takes_the_point_of_its_seed_and_of_all_tokens_before_it(params):
    """Tokens of prompt and answer count alike, so recomputing a sequence with another prompt length changes nothing."""
    for length in range(1, 40):
        row = history(params, tuple([1] * length), num_prompt=(length + 1) // 2, seed=5)
        logits = floats(0, 0) if params.typical_p == 1 else floats(0, 0, -9)
        assert sample(logits, row, EOS)[0] == int(uniforms(5, length)[0] >= 0.5)


def test_a_sequence_takes_its_points_in_turn_and_again_from_any_cut():
    row, cut = history(SamplingParams(), seed=7), history(SamplingParams(), tuple([1] * 50), seed=7)
    points = []
    for _ in range(100):
        points.append(row.point())
        assert row.point() == points[-1], "until a token is appended"
        row.append(1)
    assert points == uniforms(7, 1, 100)
    assert cut.point() == points[49]


@given(st.lists(st.sampled_from([-np.inf, -1e30, -90.0, -3.0, 0.0, 0.5, 88.0, 1e30]), min_size=1, max_size=30))
def test_log_probabilities_are_those_of_plain_sums_in_double_precision(values):
    if max(values) == -np.inf:
        values.append(0.0)
    peak = max(values)
    total = math.log(sum(math.exp(value - peak) for value in values))
    got = log_softmax(floats(*values))
    assert got.dtype == np.float32
    for found, value in zip(got.tolist(), floats(*values).tolist(), strict=True):
        assert found == pytest.approx(value - float(np.float32(peak)) - total, rel=1e-6, abs=1e-6)


ROW_PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 40]),
    top_p=st.sampled_from([0.5, 0.9, 1.0]),
    typical_p=st.sampled_from([0.5, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([0.8, 1.0, 1.5]),
    frequency_penalty=st.sampled_from([-0.5, 0.0, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.3]),
    min_tokens=st.sampled_from([0, 9]),
    stop_token_ids=st.sampled_from([(), (3, 4)]),
)


@settings(max_examples=400)
@given(
    ROW_PARAMS,
    st.lists(st.integers(0, 59), min_size=1, max_size=20),
    st.integers(0, 5),
    st.integers(0, 10_000),
    st.sampled_from([0.3, 3.0]),
)
def test_candidates_give_the_token_that_all_logits_give(params, tokens, num_prompt, seed, step):
    logits = np.round(8 * normal(60, seed) / step).astype(np.float32) * np.float32(step)  # many are equal
    row = history(params, tuple(tokens), min(num_prompt, len(tokens)), seed)
    count = num_candidates(row, len(EOS))
    if count:
        values, ids = most_likely(logits, min(count, 60))
        want, _ = sample(logits.copy(), row, EOS)
        assert sample_top(values.copy(), ids.astype(np.int32), row, EOS) == want


@pytest.mark.parametrize(
    ("params", "count"),
    [
        (SamplingParams(temperature=0), 1),
        (SamplingParams(top_k=40), 40),
        (SamplingParams(top_k=40, top_p=0.5, min_p=0.1, typical_p=0.9), 40),
        (SamplingParams(temperature=0, repetition_penalty=1.2), 1 + 3 + 2),  # distinct tokens, and two to come
        (SamplingParams(top_k=4, frequency_penalty=0.2), 4 + 2 + 2),  # distinct tokens of the answer, and two to come
        (SamplingParams(temperature=0, min_tokens=9, stop_token_ids=(8, 9)), 1 + 1 + 2),
        (SamplingParams(), 0),
        (SamplingParams(top_p=0.9), 0),
        (SamplingParams(top_k=129), 0),
        (SamplingParams(temperature=0, logprobs=0), 0),
        (SamplingParams(temperature=0, logit_bias={1: 1.0}), 0),
        (SamplingParams(temperature=0, watermark=True), 0),
        (SamplingParams(temperature=0, repetition_penalty=0.9), 0),
        (SamplingParams(temperature=0, frequency_penalty=-0.1), 0),
        (SamplingParams(temperature=0, presence_penalty=-0.1, frequency_penalty=1.0), 0),
    ],
)
def test_only_rules_that_cannot_lift_a_token_go_without_all_logits(params, count):
    assert num_candidates(history(params, (5, 5, 6, 7), num_prompt=2), len(EOS), num_more=2) == count


@pytest.mark.parametrize(
    ("params", "plain"),
    [
        (SamplingParams(), True),
        (SamplingParams(temperature=0.3, top_p=0.9, min_p=0.1, seed=4, stop=("x",), ignore_eos=True), True),
        (SamplingParams(min_tokens=2), True),  # already reached
        (SamplingParams(min_tokens=3), False),
        (SamplingParams(temperature=0), False),
        (SamplingParams(top_k=300), False),
        (SamplingParams(typical_p=0.9), False),
        (SamplingParams(repetition_penalty=0.9), False),
        (SamplingParams(frequency_penalty=0.1), False),
        (SamplingParams(presence_penalty=-0.1), False),
        (SamplingParams(logit_bias={1: 1.0}), False),
        (SamplingParams(watermark=True), False),
        (SamplingParams(logprobs=0), False),
    ],
)
def test_who_is_drawn_with_others_wants_nothing_but_temperature_top_p_and_min_p(params, plain):
    assert (choice_of(history(params, (5, 5, 6, 7), num_prompt=2), 0) is not None) == plain


def test_the_most_likely_are_in_order_and_of_equal_ones_the_first():
    values, ids = most_likely(floats(1, 3, 2, 3, 2, 2), 4)
    assert (values.tolist(), ids.tolist()) == ([3.0, 3.0, 2.0, 2.0], [1, 3, 2, 4])


def test_a_bias_on_a_whole_vocabulary_is_what_adding_it_token_by_token_gives_and_is_made_once():
    given = {i: ((i * 37) % 200 - 100) / 7 for i in range(0, 1000, 3)}
    logits = normal(1000, 3)
    expected = logits.copy()
    for token_id, bias in given.items():
        expected[token_id] += np.float32(bias)
    row = History([1], 1, SamplingParams(temperature=0, logit_bias=given), 0)
    changed = logits.copy()
    sample(changed, row, [])
    assert np.array_equal(changed, expected)
    assert row.bias() is row.bias()
