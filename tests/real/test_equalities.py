"""The real small model through the whole engine: how a request is scheduled never changes its answer."""

from dataclasses import replace

import pytest
from msgspec import structs

import ems
from kvloom.contract.config import TierConfig
from kvloom.contract.request import Delta, Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.engine import Engine
from kvloom.rank.tier.tier import with_tier
from tests.real.model import RealModel, open_real
from tests.support.engine.engines import in_process, run_all, text_of, tokens_of

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return",
    "Once upon a time, in a village by the sea, there lived an old woman who",
    "Water boils at one hundred degrees where the sea is, and at less in",
)
PARAMS = (
    SamplingParams(temperature=0, max_tokens=6),
    SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=6),
    SamplingParams(temperature=1.0, top_k=40, seed=11, max_tokens=6, repetition_penalty=1.1),
    SamplingParams(temperature=0, max_tokens=6, frequency_penalty=0.5),
)


@pytest.fixture(scope="module", params=["reference, auto", "cpu, bf16", "cpu, int8"])
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(real, tiny_path, tokenizer, kind) -> RealModel:
    """The real model; for the slow reference, a small random model with the same tokens."""
    return open_real(tiny_path, tokenizer, kind) if "reference" in kind else real(kind)


@pytest.fixture(scope="module")
def requests(tokenizer) -> list[Request]:
    return [Request(f"r{i}", tuple(tokenizer.encode(text)), PARAMS[i]) for i, text in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def undisturbed(model, requests) -> dict[str, list[Delta]]:
    """The deltas of each request alone, with its prompt computed in one piece and nothing cached."""
    return {request.id: run_all(plain(model), request)[request.id] for request in requests}


@pytest.fixture(scope="module")
def alone(undisturbed) -> dict[str, list[int]]:
    return {name: tokens_of(deltas) for name, deltas in undisturbed.items()}


def plain(model: RealModel, num_blocks: int | None = None, **fields: object) -> Engine:
    return model.engine(num_blocks, **{"enable_prefix_cache": False, "num_speculative_tokens": 0, **fields})


def only_begun(requests: list[Request]) -> list[Request]:
    """The same requests, each limited to one token: they put their prompts into a cache."""
    return [replace(request, params=replace(request.params, max_tokens=1)) for request in requests]


def test_step_by_step_equals_steps_planned_ahead(model, requests, alone):
    together = run_all(plain(model, run_ahead=False), *requests)
    assert {name: tokens_of(deltas) for name, deltas in together.items()} == alone


def test_batched_equals_alone(model, requests, alone):
    together = run_all(plain(model), *requests)
    assert {name: tokens_of(deltas) for name, deltas in together.items()} == alone


def test_a_prompt_in_chunks_equals_one_in_one_piece(model, requests, alone):
    chunked = run_all(plain(model, max_batch=2, max_tokens_per_step=5), *requests)
    assert {name: tokens_of(deltas) for name, deltas in chunked.items()} == alone


def test_a_cached_prefix_equals_a_computed_one(model, requests, alone):
    engine = model.engine()
    run_all(engine, *only_begun(requests))
    again = run_all(engine, *requests)
    assert {name: tokens_of(deltas) for name, deltas in again.items()} == alone
    assert any(deltas[0].num_cached_tokens for deltas in again.values())


def test_loaded_from_ems_equals_computed(model, requests, alone):
    """An engine with an empty KV cache loads the blocks that another one has computed, bit for bit."""
    tier = TierConfig("kvloom.rank.tier.ems:open_tier", timeout_s=10.0, is_watched=True)
    with ems.embedded(pool="64M"):
        for asked, num_cached in ((only_begun(requests), 0), (requests, 16)):
            model.forget()
            tiered = with_tier(model.runner, tier, model.runner.kv_memory(model.config.model))
            config = replace(model.config, kv_tier=tier)
            engine = Engine(config, in_process(tiered, config), model.tokenizer)
            found = run_all(engine, *asked, max_steps=10**7)
            for request in asked:
                assert tokens_of(found[request.id]) == alone[request.id][: request.params.max_tokens]
            assert max(deltas[-1].num_cached_tokens for deltas in found.values()) >= num_cached
            assert engine.stats().total_tier_loaded_blocks == (0 if num_cached == 0 else 1)
            tiered.close()


def test_preempted_and_resumed_equals_undisturbed(model, requests, alone):
    engine = plain(model, num_blocks=5)
    found = run_all(engine, *requests)
    assert engine.stats().total_preemptions > 0
    assert {name: tokens_of(deltas) for name, deltas in found.items()} == alone


REPEATING = "def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n    return"
GUESSED = (
    SamplingParams(temperature=0, max_tokens=7, ignore_eos=True),
    SamplingParams(temperature=0.4, seed=3, max_tokens=7, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=7, ignore_eos=True, frequency_penalty=0.1, logprobs=1),
)


def test_guessed_ahead_equals_one_token_at_a_time(real, kind, requests):
    """With the real model, which repeats text of its prompt; a random one does not."""
    model, other = real(kind), requests[1]
    repeating = [Request(f"again{i}", model.ids(REPEATING), params) for i, params in enumerate(GUESSED)]
    want = run_all(plain(model), *repeating, other)
    engine = model.engine(num_speculative_tokens=4, enable_prefix_cache=False)  # as the plain one, which counts no hits
    got = run_all(engine, *repeating, other)
    assert {name: tokens_of(deltas) for name, deltas in got.items()} == {
        name: tokens_of(deltas) for name, deltas in want.items()
    }
    for request in repeating:
        if model.config.backend == "cpu":  # the reference's last bits depend on the prompt's chunks
            assert [structs.replace(delta, num_guessed=(0, 0)) for delta in got[request.id]] == want[request.id]
    assert 0 < engine.stats().total_accepted_tokens <= engine.stats().total_draft_tokens


def test_streamed_text_is_the_text_of_the_tokens(undisturbed, tokenizer):
    for deltas in undisturbed.values():
        assert text_of(deltas) == tokenizer.decode(tokens_of(deltas))


def test_log_probabilities_of_a_prompt_are_those_of_generating_it(model):
    prompt = model.ids(PROMPTS[0])
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=0, ignore_eos=True)
    deltas = run_all(plain(model), Request("a", prompt, params))["a"]
    whole = prompt + tuple(tokens_of(deltas))
    scored = run_all(plain(model), Request("b", whole, SamplingParams(max_tokens=0, prompt_logprobs=0)))
    values = scored["b"][0].prompt_logprobs
    assert values is not None
    for delta, value in zip(deltas, values[len(prompt) :], strict=True):
        assert value is not None
        assert value.token_id == delta.token_ids[0]
        assert value.logprob == pytest.approx(delta.logprobs[0].logprob, abs=1e-3)
