"""SamplingParams: every value outside its range is refused by name."""

import math

import pytest

from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import BadRequest
from kvloom.contract.request import Request, check_request
from kvloom.contract.sampling import ROWS, SamplingParams

OUTSIDE = [
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("top_k", -1),
    ("top_p", 0.0),
    ("top_p", 1.5),
    ("min_p", -0.1),
    ("typical_p", 0.0),
    ("repetition_penalty", 0.0),
    ("frequency_penalty", 2.5),
    ("presence_penalty", -2.5),
    ("max_tokens", -1),
    ("min_tokens", -1),
    ("max_reasoning_tokens", -1),
    ("seed", 2**64),
    ("logprobs", 21),
    ("prompt_logprobs", -1),
    ("scored_from", -1),
    ("stop", ("a", "")),
]


@pytest.mark.parametrize(("field", "value"), OUTSIDE)
def test_a_value_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(BadRequest) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field


def test_every_parameter_with_a_range_is_tried_outside_of_it():
    assert {name for name, row in ROWS.items() if row.low is not None} <= {name for name, _ in OUTSIDE}


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("top_p", 0, "must be above 0"),
        ("top_p", -1, "must be between 0 and 1, got -1"),
        ("min_p", -1, "must be between 0 and 1, got -1"),
        ("top_k", 10**400, "must be between 0 and 2147483647, got a number of 1329 bits"),
    ],
)
def test_a_refusal_says_what_is_permitted(field, value, problem):
    with pytest.raises(BadRequest) as caught:
        SamplingParams(**{field: value})
    assert caught.value.problem == problem


@pytest.mark.parametrize("bad", [-1, 258, 2**70])
@pytest.mark.parametrize("field", ["prompt", "logit_bias", "stop_token_ids", "logprob_ids"])
def test_a_token_outside_the_vocabulary_is_refused_by_name(field: str, bad: int):
    """Ranks take every token id as an index of their logits."""
    prompt = (1, bad) if field == "prompt" else (1,)
    named = {} if field == "prompt" else {field: {bad: 1.0} if field == "logit_bias" else (0, bad)}
    with pytest.raises(BadRequest, match=f"{field}: token id {bad} is outside the vocabulary of 258"):
        check_request(Request("a", prompt, SamplingParams(**named)), 64, 258)


@pytest.mark.parametrize("fields", [{}, {"temperature": 0}, {"top_p": 1e-6}, {"seed": -(2**63)}, {"max_tokens": 0}])
def test_values_at_the_edge_are_accepted(fields):
    SamplingParams(**fields)


@pytest.mark.parametrize(("fields", "is_greedy"), [({"temperature": 0}, True), ({"top_k": 1}, True), ({}, False)])
def test_temperature_zero_and_top_k_one_are_greedy(fields, is_greedy):
    assert SamplingParams(**fields).is_greedy is is_greedy


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"backend": "t p u"}, "backend"),
        ({"model": "", "backend": "auto"}, "model"),
        ({"backend": "fake", "dtype": "int3"}, "dtype"),
        ({"backend": "fake", "max_batch": 0}, "max_batch"),
        ({"backend": "fake", "num_blocks": 1}, "num_blocks"),
        ({"backend": "fake", "max_batch": 8, "max_tokens_per_step": 7}, "max_tokens_per_step"),
        ({"backend": "fake", "max_seq_len": 2**31}, "max_seq_len"),
        ({"backend": "fake", "kv_cache_bytes": 2**63}, "kv_cache_bytes"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_by_name(fields, field):
    with pytest.raises(BadRequest) as caught:
        EngineConfig(**fields)
    assert caught.value.field == field
