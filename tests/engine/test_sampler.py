"""Sampler: what each rule leaves, measured on distributions small enough to know the answer."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.engine.kernels.backend import most_likely
from kvloom.engine.request import SamplingParams
from kvloom.engine.sampler import History, num_candidates, sample, sample_top, uniform

EOS = [0]


def history(
    params: SamplingParams, tokens: tuple[int, ...] = (1,), num_prompt: int | None = None, seed: int = 0
) -> History:
    row = History(list(tokens[:num_prompt]), len(tokens[:num_prompt]), params, seed)
    for token in tokens[len(row.token_ids) :]:
        row.append(token)
    return row


def draw(probs: list[float], params: SamplingParams, count: int = 400, **fields: object) -> Counter[int]:
    """Tokens drawn with `count` different seeds from a distribution."""
    rows = [history(params, seed=seed, **fields) for seed in range(count)]  # type: ignore[arg-type]
    logits = torch.tensor([probs]).log().repeat(count, 1)
    return Counter(token for token, _ in sample(logits, rows, EOS))


def test_greedy_takes_the_most_likely_token():
    logits = torch.tensor([[0.0, 3.0, 2.0], [5.0, 3.0, 2.0]])
    rows = [history(SamplingParams(temperature=0)), history(SamplingParams(top_k=1))]
    assert [token for token, _ in sample(logits, rows, EOS)] == [1, 0]


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


def test_top_p_over_a_large_flat_vocabulary_looks_beyond_the_first_candidates():
    probs = [1 / 4096] * 4096
    assert len(draw(probs, SamplingParams(top_p=0.9), count=300)) > 250
    assert len(draw(probs, SamplingParams(min_p=0.5), count=300)) > 250
    assert len(draw(probs, SamplingParams(typical_p=0.9), count=300)) > 250


def test_repetition_penalty_counts_prompt_and_answer_and_pushes_either_sign_down():
    logits = torch.tensor([[2.0, 1.5, -1.0]])
    assert (
        sample(logits.clone(), [history(SamplingParams(temperature=0, repetition_penalty=2.0), (0,))], EOS)[0][0] == 1
    )
    logits = torch.tensor([[-1.0, -1.5, -9.0]])
    assert (
        sample(logits.clone(), [history(SamplingParams(temperature=0, repetition_penalty=2.0), (0,))], EOS)[0][0] == 1
    )


def test_frequency_and_presence_penalties_count_the_answer_only():
    logits = torch.tensor([[1.0, 0.8]])
    prompt_only = history(SamplingParams(temperature=0, frequency_penalty=1.0), (0, 0, 0))
    answered = history(SamplingParams(temperature=0, frequency_penalty=1.0), (1, 0), num_prompt=1)
    present = history(SamplingParams(temperature=0, presence_penalty=0.3), (1, 0), num_prompt=1)
    assert [sample(logits.clone(), [row], EOS)[0][0] for row in (prompt_only, answered, present)] == [0, 1, 1]


def test_a_watermark_favours_the_same_half_of_the_vocabulary_after_the_same_token():
    flat = [1 / 64] * 64
    marked = draw(flat, SamplingParams(watermark=True), count=2000, tokens=(5,))
    favoured = {token for token, count in marked.items() if count > 2000 / 64}
    assert 26 <= len(favoured) <= 34  # half of them
    assert sum(marked[token] for token in favoured) > 1600  # e^2 : 1
    assert draw(flat, SamplingParams(watermark=True), count=2000, tokens=(6,)) != marked


def test_log_probabilities_are_of_the_raw_distribution():
    probs = [0.1, 0.6, 0.3]
    params = SamplingParams(temperature=0, logit_bias={1: -100.0}, logprobs=2)
    ((token, logprob),) = sample(torch.tensor([probs]).log(), [history(params)], EOS)
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
    logits = 3 * torch.randn(len(params), 3000, generator=torch.Generator().manual_seed(seed))
    together = sample(logits.clone(), [history(p, (4, 5), 1, seed=i) for i, p in enumerate(params)], EOS)
    alone = [sample(logits[i : i + 1].clone(), [history(p, (4, 5), 1, seed=i)], EOS)[0] for i, p in enumerate(params)]
    assert together == alone


def test_randomness_is_a_function_of_seed_and_position():
    assert uniform(3, 7) == uniform(3, 7)
    assert len({uniform(seed, pos) for seed in (-1, 0, 1, 2**63) for pos in range(50)}) == 200
    assert all(0 <= uniform(0, pos) < 1 for pos in range(100))


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
    logits = 8 * torch.randn(60, generator=torch.Generator().manual_seed(seed))
    logits = (logits / step).round() * step  # many equal ones
    row = history(params, tuple(tokens), min(num_prompt, len(tokens)), seed)
    count = num_candidates(row, len(EOS))
    if count:
        values, ids = most_likely(logits, min(count, 60))
        ((want, _),) = sample(logits[None].clone(), [row], EOS)
        assert sample_top(values.clone(), ids.int(), row, EOS) == want


@pytest.mark.parametrize(
    ("params", "count"),
    [
        (SamplingParams(temperature=0), 1),
        (SamplingParams(top_k=40), 40),
        (SamplingParams(top_k=40, top_p=0.5, min_p=0.1, typical_p=0.9), 40),
        (SamplingParams(temperature=0, repetition_penalty=1.2), 1 + 3 + 2),  # distinct tokens, and two to come
        (SamplingParams(top_k=4, frequency_penalty=0.2), 4 + 2 + 2),  # of the answer
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


def test_the_most_likely_are_in_order_and_of_equal_ones_the_first():
    values, ids = most_likely(torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0, 2.0]), 4)
    assert (values.tolist(), ids.tolist()) == ([3.0, 3.0, 2.0, 2.0], [1, 3, 2, 4])
