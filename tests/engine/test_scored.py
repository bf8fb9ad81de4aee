"""Log-probabilities of the end of a prompt, of which the beginning is in the cache; and of what would follow it."""

import pytest

from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from tests.engine.test_engine import GREEDY, prompt
from tests.support.engine.engines import fake_engine, run_all


@pytest.mark.parametrize("scored_from", [2, 9, 13, 16, 17])
@pytest.mark.parametrize("max_tokens_per_step", [4, 512])
def test_log_probabilities_from_a_position_on_leave_the_tokens_before_to_the_cache(scored_from, max_tokens_per_step):
    engine = fake_engine(max_batch=2, max_tokens_per_step=max_tokens_per_step)
    run_all(engine, Request("a", prompt(17), GREEDY))
    params = SamplingParams(max_tokens=0, prompt_logprobs=0, scored_from=scored_from)
    (delta,) = run_all(engine, Request("b", prompt(17), params))["b"]
    told = [value and value.token_id for value in delta.prompt_logprobs or ()]
    assert told == list(prompt(17)[scored_from:])
    assert delta.num_cached_tokens == (scored_from - 1) // 4 * 4


def test_preempted_requests_tell_log_probabilities_from_a_position_on_once():
    params = SamplingParams(temperature=0, max_tokens=12, prompt_logprobs=0, scored_from=7, ignore_eos=True)
    engine = fake_engine(num_blocks=9, max_seq_len=36, max_batch=3, max_tokens_per_step=4)
    found = run_all(engine, *(Request(f"r{i}", prompt(16, 40 * i), params) for i in range(3)))
    assert engine.stats().total_preemptions > 0
    for i in range(3):
        told = [delta.prompt_logprobs for delta in found[f"r{i}"] if delta.prompt_logprobs is not None]
        assert [[value and value.token_id for value in values] for values in told] == [list(prompt(16, 40 * i)[7:])]


def test_named_tokens_are_told_of_what_would_follow_a_prompt_that_nothing_is_generated_for():
    params = SamplingParams(
        temperature=0, max_tokens=0, logprobs=0, logprob_ids=(5, 9), prompt_logprobs=0, scored_from=8
    )
    engine = fake_engine()
    (delta,) = run_all(engine, Request("a", prompt(9), params))["a"]
    (following,) = delta.logprobs
    first = SamplingParams(max_tokens=1, logprobs=0, logprob_ids=(5, 9), temperature=0)
    (generated,) = run_all(engine, Request("b", prompt(9), first))["b"]
    assert following.top == generated.logprobs[0].top
    assert [token for token, _ in following.top] == [5, 9]
    assert (delta.token_ids, delta.text, engine.stats().total_output_tokens) == ((), "", 1)
