"""Log-probabilities of the end of a prompt, of which the beginning is in the cache; and of what would follow it."""

import pytest

from kvloom.contract.request import Delta, FinishReason, Request
from kvloom.contract.sampling import SamplingParams
from tests.engine.test_engine import GREEDY, prompt
from tests.support.engine.engines import fake_engine, run_all


def test_prompt_log_probabilities_are_computed_even_when_the_prompt_is_cached():
    engine = fake_engine()
    run_all(engine, Request("a", prompt(17), GREEDY))
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    (delta,) = run_all(engine, Request("b", prompt(17), params))["b"]
    assert delta.prompt_logprobs is not None
    assert len(delta.prompt_logprobs) == 17
    assert (delta.token_ids, delta.finish_reason) == ((), FinishReason.LENGTH)


@pytest.mark.parametrize("scored_from", [2, 9, 13, 16, 17])
@pytest.mark.parametrize("max_tokens_per_step", [4, 512])
def test_log_probabilities_from_a_position_on_leave_the_tokens_before_to_the_cache(scored_from, max_tokens_per_step):
    engine = fake_engine(max_batch=2, max_tokens_per_step=max_tokens_per_step)
    run_all(engine, Request("a", prompt(17), GREEDY))
    params = SamplingParams(max_tokens=0, prompt_logprobs=0, scored_from=scored_from)
    (delta,) = run_all(engine, Request("b", prompt(17), params))["b"]
    told = [value and value.token_id for value in delta.prompt_logprobs or ()]
    assert told == list(prompt(17)[scored_from:])
    assert delta.num_cached_tokens == scored_from - 1


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


LABELS = ((1,), (2, 3), (4, 5, 6, 7, 8), ())


def scored(name: str, before: tuple[int, ...], label: tuple[int, ...], salt: str = "") -> Request:
    params = SamplingParams(
        temperature=0, max_tokens=0, logprobs=0, logprob_ids=(5, 9), prompt_logprobs=0, scored_from=len(before)
    )
    return Request(name, before + label, params, cache_salt=salt)


def told(deltas: list[Delta]) -> object:
    (delta,) = deltas
    return delta.prompt_logprobs, delta.logprobs


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9, 10, 11, 17, 30])
@pytest.mark.parametrize("num_blocks", [12, 64])
def test_ends_of_one_prompt_are_scored_as_if_each_were_alone(length: int, num_blocks: int):
    """The fake model reads its answers from the blocks, so a wrong copy would be seen."""
    before = prompt(length)
    requests = [scored(f"r{i}", before, label) for i, label in enumerate(LABELS)]
    alone = [told(run_all(fake_engine(), request)[request.id]) for request in requests]
    engine = fake_engine(num_blocks=num_blocks, max_seq_len=40, max_batch=4)
    found = run_all(engine, *requests)
    assert [told(found[request.id]) for request in requests] == alone
    stats = engine.stats()
    num_prompt = sum(length + len(label) for label in LABELS)
    num_computed = stats.total_prompt_tokens - stats.total_cached_tokens
    least = num_prompt - 3 * (length - 1)
    assert num_computed == least or (num_blocks == 12 and num_computed < least + 3 * 4)  # no block may be left to copy
    assert stats.num_free_blocks == num_blocks


def test_ends_share_nothing_with_those_of_another_prompt_or_salt():
    engine, before = fake_engine(), prompt(10)
    run_all(engine, scored("a", before, (1,)))
    others = [
        scored("b", (*before[:8], 99, 10), (2,)),
        scored("c", before, (2,), "other"),
        scored("d", before[1:], (2,)),
    ]
    found = run_all(engine, *others)
    assert [found[request.id][0].num_cached_tokens for request in others] == [8, 0, 0]
    (delta,) = run_all(engine, scored("e", before, (3,)))["e"]
    assert delta.num_cached_tokens == 9


def test_a_part_is_forgotten_with_its_block_and_with_the_cache():
    engine, before = fake_engine(num_blocks=9, max_seq_len=36), prompt(3)
    run_all(engine, scored("a", before, (1,)))
    run_all(engine, Request("b", prompt(34, 100), GREEDY))  # takes every block
    (delta,) = run_all(engine, scored("c", before, (2,)))["c"]
    assert delta.num_cached_tokens == 0
    (delta,) = run_all(engine, scored("e", before, (2,)))["e"]
    assert delta.num_cached_tokens == 2
    engine.reset_prefix_cache()
    (delta,) = run_all(engine, scored("d", before, (3,)))["d"]
    assert delta.num_cached_tokens == 0


def test_without_a_cache_every_end_computes_its_prompt():
    engine, before = fake_engine(enable_prefix_cache=False), prompt(10)
    found = run_all(engine, *(scored(f"r{i}", before, label) for i, label in enumerate(LABELS)))
    assert {deltas[0].num_cached_tokens for deltas in found.values()} == {0}


def test_where_no_block_is_left_for_a_copy_the_end_computes_it_again():
    engine, before = fake_engine(num_blocks=3, max_seq_len=12), prompt(10)
    run_all(engine, scored("a", before, (1,)))
    (delta,) = run_all(engine, scored("b", before, (2,)))["b"]
    assert delta.num_cached_tokens == 8
    assert told([delta]) == told(run_all(fake_engine(), scored("b", before, (2,)))["b"])
