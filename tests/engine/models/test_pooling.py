"""Embeddings through the engine: the same however the prompt was scheduled, beside requests that generate."""

from array import array

import pytest

from kvloom.contract.errors import BadRequest
from kvloom.contract.pooling import POOLINGS, unit
from kvloom.contract.request import Delta, FinishReason, Request
from kvloom.contract.sampling import SamplingParams
from kvloom.rank.fake import fake_answer, fake_embedding
from tests.support.engine.engines import drain, fake_engine, run_all, tokens_of

NOTHING = SamplingParams(max_tokens=0)
PROMPT = tuple(range(1, 31))


def pooled(name: str, prompt: tuple[int, ...] = PROMPT, pooling: str = "mean") -> Request:
    return Request(name, prompt, NOTHING, pooling=pooling)


def vector_of(deltas: list[Delta]) -> list[float]:
    assert [delta.finish_reason for delta in deltas] == [FinishReason.LENGTH], "one delta, the last"
    assert deltas[0].embedding is not None
    assert tokens_of(deltas) == []
    return list(array("f", deltas[0].embedding))


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("max_tokens_per_step", [1, 3, 16, 64])
def test_chunks_do_not_show(pooling: str, max_tokens_per_step: int):
    engine = fake_engine(max_batch=1, max_tokens_per_step=max_tokens_per_step)
    assert vector_of(run_all(engine, pooled("a", pooling=pooling))["a"]) == fake_embedding(PROMPT, pooling)
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


@pytest.mark.parametrize(("pooling", "num_cached"), [("last", 29), ("mean", 0), ("cls", 0)])
def test_cached_is_computed_and_mean_and_first_reuse_nothing(pooling: str, num_cached: int):
    engine = fake_engine(enable_prefix_cache=True)
    first = run_all(engine, pooled("a", pooling=pooling))["a"]
    second = run_all(engine, pooled("b", pooling=pooling))["b"]
    assert vector_of(first) == vector_of(second) == fake_embedding(PROMPT, pooling)
    assert second[0].num_cached_tokens == num_cached


def test_blocks_of_an_embedding_serve_a_generation():
    engine = fake_engine(enable_prefix_cache=True)
    run_all(engine, pooled("a"))
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    deltas = run_all(engine, Request("b", PROMPT, params))["b"]
    assert deltas[0].num_cached_tokens == 29
    assert tokens_of(deltas) == fake_answer(PROMPT, params, 0, 3)


def test_embeddings_share_steps_with_generations():
    engine = fake_engine(max_batch=6, max_tokens_per_step=12, num_speculative_tokens=2)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [PROMPT[i : i + 9 + i] for i in range(4)]
    engine.add(Request("g0", PROMPT, params))
    for i, prompt in enumerate(prompts):
        engine.add(pooled(f"e{i}", prompt, POOLINGS[i % 3]))
    engine.add(Request("g1", PROMPT[3:], params))
    found = drain(engine)
    for i, prompt in enumerate(prompts):
        assert vector_of(found[f"e{i}"]) == fake_embedding(prompt, POOLINGS[i % 3])
    assert tokens_of(found["g0"]) == fake_answer(PROMPT, params, 0, 12)
    assert tokens_of(found["g1"]) == fake_answer(PROMPT[3:], params, 0, 12)
    assert engine.stats().total_output_tokens == 24


@pytest.mark.usefixtures("swaps_always")
@pytest.mark.parametrize("num_host_blocks", [0, 16])
def test_a_preempted_embedding_is_the_same(num_host_blocks: int):
    """Two long prompts, computed in chunks, in blocks for one and a half of them, beside a decode that takes more."""
    limits = {"max_batch": 4, "max_tokens_per_step": 4, "max_seq_len": 48}
    engine = fake_engine(num_blocks=14, num_host_blocks=num_host_blocks, **limits)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    long = tuple(range(1, 41))
    found = run_all(engine, Request("g", PROMPT[:8], params), pooled("a", long), pooled("b", long[::-1]))
    assert engine.stats().total_preemptions > 0
    assert (engine.stats().total_swapped > 0) == (num_host_blocks > 0)
    assert vector_of(found["a"]) == fake_embedding(long, "mean")
    assert vector_of(found["b"]) == fake_embedding(long[::-1], "mean")
    assert tokens_of(found["g"]) == fake_answer(PROMPT[:8], params, 0, 24)


def test_an_aborted_embedding_frees_its_blocks():
    engine = fake_engine(max_batch=8, max_tokens_per_step=8)
    engine.add(pooled("a"))
    engine.step()
    engine.abort("a")
    deltas = drain(engine)["a"]
    assert [(delta.finish_reason, delta.embedding) for delta in deltas] == [(FinishReason.ABORT, None)]
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_a_prompt_may_fill_the_context_and_no_more():
    engine = fake_engine(max_seq_len=64)
    whole = tuple(i % 256 for i in range(64))
    assert vector_of(run_all(engine, pooled("a", whole))["a"]) == fake_embedding(whole, "mean")
    with pytest.raises(BadRequest, match="must fit in 64"):
        engine.add(pooled("b", (*whole, 1)))


@pytest.mark.parametrize(("pooling", "params"), [("max", NOTHING), ("mean", SamplingParams())])
def test_what_no_backend_has_is_refused(pooling: str, params: SamplingParams):
    with pytest.raises(BadRequest, match="pooling: must be one of last, mean, cls, with max_tokens 0"):
        fake_engine().add(Request("a", PROMPT, params, pooling=pooling))


def test_vectors_are_of_length_1():
    data = array("f", [3.0, 4.0, 12.0]).tobytes()
    assert list(unit(data)) == pytest.approx([3 / 13, 4 / 13, 12 / 13])
    assert list(unit(data, 2)) == pytest.approx([0.6, 0.8])
    assert list(unit(array("f", [0.0, 0.0]).tobytes())) == [0.0, 0.0]
