"""The real small model through the whole engine: how a request is scheduled never changes its answer."""

from dataclasses import replace

import pytest

import ems
from kvloom.engine.config import EngineConfig, TierConfig
from kvloom.engine.engine import Engine
from kvloom.engine.executor import InProcessExecutor
from kvloom.engine.kvtier import TieredRunner, open_tier
from kvloom.engine.request import Request, SamplingParams
from kvloom.engine.runner import ModelRunner, open_runner
from kvloom.engine.tokenizer import Tokenizer, load_tokenizer
from tests.support.engines import run_all, text_of, tokens_of

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea, there lived an old woman who",
    "Water boils at one hundred degrees because",
)
PARAMS = (
    SamplingParams(temperature=0, max_tokens=16),
    SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=16),
    SamplingParams(temperature=1.0, top_k=40, seed=11, max_tokens=16, repetition_penalty=1.1),
    SamplingParams(temperature=0, max_tokens=16, frequency_penalty=0.5),
)


@pytest.fixture(scope="module")
def tokenizer(smollm2_path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


@pytest.fixture(scope="module", params=["reference, auto", "cpu, bf16", "cpu, int8"])
def config(smollm2_path, request) -> EngineConfig:
    backend, kv_dtype = request.param.split(", ")
    return EngineConfig(model=str(smollm2_path), backend=backend, kv_dtype=kv_dtype, num_blocks=64, max_seq_len=256)


@pytest.fixture(scope="module")
def runner(config) -> ModelRunner:
    return open_runner(config, [2], lambda done, total: None)


@pytest.fixture(scope="module")
def requests(tokenizer) -> list[Request]:
    return [Request(f"r{i}", tuple(tokenizer.encode(text)), PARAMS[i]) for i, text in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def alone(runner, tokenizer, requests) -> dict[str, list[int]]:
    """Each request by itself, its prompt computed in one piece, nothing cached."""
    return {request.id: tokens_of(run_all(make_engine(runner, tokenizer), request)[request.id]) for request in requests}


def make_engine(runner: ModelRunner, tokenizer: Tokenizer, **fields: object) -> Engine:
    config = EngineConfig(model="m", backend="reference", **{"enable_prefix_cache": False, **fields})  # type: ignore[arg-type]
    return Engine(config, InProcessExecutor(runner), tokenizer)


def test_batched_equals_alone(runner, tokenizer, requests, alone):
    together = run_all(make_engine(runner, tokenizer), *requests)
    assert {name: tokens_of(deltas) for name, deltas in together.items()} == alone


def test_a_prompt_in_chunks_equals_one_in_one_piece(runner, tokenizer, requests, alone):
    chunked = run_all(make_engine(runner, tokenizer, max_batch=2, max_tokens_per_step=5), *requests)
    assert {name: tokens_of(deltas) for name, deltas in chunked.items()} == alone


def test_a_cached_prefix_equals_a_computed_one(runner, tokenizer, requests, alone):
    engine = make_engine(runner, tokenizer, enable_prefix_cache=True)
    run_all(engine, *requests)
    again = run_all(engine, *requests)
    assert {name: tokens_of(deltas) for name, deltas in again.items()} == alone
    assert any(deltas[0].num_cached_tokens for deltas in again.values())


def test_loaded_from_ems_equals_computed(smollm2_path, config, runner, tokenizer, requests, alone):
    """A second runner, with an empty KV cache, takes over what the first one computed, bit for bit."""
    loaded = open_runner(config, [2], lambda done, total: None)
    tier = TierConfig("kvloom.server.ems_tier:open_tier", timeout_s=10.0)
    with ems.embedded(pool="64M"):
        for each, num_cached in ((runner, 0), (loaded, 16)):
            opened = open_tier(tier, each.kv_memory(str(smollm2_path)))
            engine = Engine(
                EngineConfig(model="m", backend="reference", kv_tier=tier),
                InProcessExecutor(TieredRunner(each, opened)),
                tokenizer,
            )
            found = run_all(engine, *requests, max_steps=10**7)
            assert {name: tokens_of(deltas) for name, deltas in found.items()} == alone
            assert max(deltas[-1].num_cached_tokens for deltas in found.values()) >= num_cached
            assert engine.stats().total_tier_loaded_blocks == (0 if num_cached == 0 else 1)
            opened.close()


def test_preempted_and_resumed_equals_undisturbed(config, tokenizer, requests, alone):
    small = open_runner(replace(config, num_blocks=5, max_seq_len=64), [2], lambda done, total: None)
    engine = make_engine(small, tokenizer)
    found = run_all(engine, *requests)
    assert engine.stats().total_preemptions > 0
    assert {name: tokens_of(deltas) for name, deltas in found.items()} == alone


REPEATING = "def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n    return"


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=48, ignore_eos=True),
        SamplingParams(temperature=0.4, seed=3, max_tokens=48, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, frequency_penalty=0.1, logprobs=1),
    ],
)
def test_guessed_ahead_equals_one_token_at_a_time(runner, tokenizer, requests, params):
    repeating = Request("again", tuple(tokenizer.encode(REPEATING)), params)
    want = run_all(make_engine(runner, tokenizer), repeating, *requests)
    engine = make_engine(runner, tokenizer, num_speculative_tokens=4, enable_prefix_cache=True)
    got = run_all(engine, repeating, *requests)
    assert {name: tokens_of(deltas) for name, deltas in got.items()} == {
        name: tokens_of(deltas) for name, deltas in want.items()
    }
    if runner.info.backend == "cpu":  # the reference's last bits depend on how a prompt was cut
        assert got["again"] == want["again"]
    assert 0 < engine.stats().total_accepted_tokens <= engine.stats().total_draft_tokens


def test_streamed_text_is_the_text_of_the_tokens(runner, tokenizer, requests):
    for request in requests:
        deltas = run_all(make_engine(runner, tokenizer), request)[request.id]
        assert text_of(deltas) == tokenizer.decode(tokens_of(deltas))


def test_log_probabilities_of_a_prompt_are_those_of_generating_it(runner, tokenizer):
    prompt = tuple(tokenizer.encode(PROMPTS[0]))
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True)
    deltas = run_all(make_engine(runner, tokenizer), Request("a", prompt, params))["a"]
    whole = prompt + tuple(tokens_of(deltas))
    scored = run_all(
        make_engine(runner, tokenizer), Request("b", whole, SamplingParams(max_tokens=0, prompt_logprobs=0))
    )
    values = scored["b"][0].prompt_logprobs
    assert values is not None
    for delta, value in zip(deltas, values[len(prompt) :], strict=True):
        assert value is not None
        assert value.token_id == delta.token_ids[0]
        assert value.logprob == pytest.approx(delta.logprobs[0].logprob, abs=1e-3)
