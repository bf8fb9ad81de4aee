"""Tensor parallelism: several rank processes answer as one does, and die and come back together."""

import asyncio
import os
import random
import signal
from dataclasses import replace

import pytest
import torch

from kvloom.engine.config import EngineConfig, TierConfig
from kvloom.engine.engine import Engine
from kvloom.engine.errors import BadRequest, GenerationFailed, ModelError, Unavailable
from kvloom.engine.executor import RankExecutor
from kvloom.engine.fake import ByteTokenizer, fake_answer
from kvloom.engine.request import Request, SamplingParams
from kvloom.engine.shard import ShardedWeights, shard_spec
from kvloom.engine.thread import EngineThread, open_engine
from kvloom.engine.weights.checkpoint import open_checkpoint
from tests.support.checkpoints import save, tiny_model
from tests.support.engines import run_all
from tests.support.pool import running_agent

NUM_KILLS = int(os.environ.get("KVLOOM_TEST_RANK_KILLS", "6"))
LOGPROB_TOLERANCE = 1e-4  # of float32 sums in another order
PARAMS = (
    SamplingParams(temperature=0, max_tokens=20, logprobs=3),
    SamplingParams(temperature=0, max_tokens=12, prompt_logprobs=0),
    SamplingParams(temperature=0, repetition_penalty=1.2, max_tokens=20),
)


def answers(config: EngineConfig) -> tuple[list[list[int]], list[float]]:
    """Tokens of three requests that run together, and the log-probabilities they asked for."""
    executor = RankExecutor(config, list)
    try:
        engine = Engine(config, executor, ByteTokenizer())
        requests = [Request(f"r{i}", tuple(range(3 + i, 40 + i)), params) for i, params in enumerate(PARAMS)]
        found = run_all(engine, *requests)
    finally:
        executor.close()
    values = [value.logprob for request in requests for delta in found[request.id] for value in delta.logprobs]
    for delta in found["r1"]:
        values += [value.logprob for value in delta.prompt_logprobs or () if value is not None]
    return [[token for delta in found[request.id] for token in delta.token_ids] for request in requests], values


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_two_ranks_give_the_tokens_of_one(tmp_path, name):
    path = save(tiny_model(name), tmp_path)
    config = EngineConfig(model=str(path), backend="reference", dtype="float32", num_blocks=64)
    alone, alone_values = answers(config)
    shared, shared_values = answers(replace(config, world_size=2))
    assert shared == alone
    assert torch.allclose(torch.tensor(shared_values), torch.tensor(alone_values), atol=LOGPROB_TOLERANCE, rtol=0)


def test_each_rank_keeps_its_part_of_a_block_in_the_pool(tmp_path):
    """What another pair of ranks has saved is loaded; a block counts only when both parts are there."""
    path = save(tiny_model("llama"), tmp_path)
    requests = [Request(f"r{i}", tuple(range(3 + i, 60 + i)), params) for i, params in enumerate(PARAMS)]

    def run(config: EngineConfig) -> tuple[list[list[int]], int]:
        executor = RankExecutor(config, list)
        try:
            engine = Engine(config, executor, ByteTokenizer())
            found = run_all(engine, *requests, max_steps=10**7)
            loaded = engine.stats().total_tier_loaded_blocks
        finally:
            executor.close()
        return [[token for delta in found[r.id] for token in delta.token_ids] for r in requests], loaded

    with running_agent(pool_bytes=32 << 20) as agent:
        tier = TierConfig("kvloom.server.ems_tier:open_tier", 5.0, {"socket": str(agent.config.socket)})
        config = EngineConfig(
            model=str(path), backend="reference", dtype="float32", num_blocks=64, world_size=2, kv_tier=tier
        )
        want, cold = run(config)
        again, warm = run(config)
        assert (again, cold) == (want, 0)
        assert warm > 0
        pool = agent.node.pools()[0]
        pool.evict(pool.usage()["used_bytes"] // 2)
        assert run(config)[0] == want


def test_the_parts_of_the_ranks_are_the_whole(tmp_path):
    checkpoint = open_checkpoint(save(tiny_model("qwen2"), tmp_path))
    spec = shard_spec(checkpoint.spec, 2)
    parts = [ShardedWeights(checkpoint.weights, rank, 2) for rank in range(2)]
    shapes = spec.tensor_shapes()
    for name in parts[0].names():
        pieces, whole = [part.float32(name) for part in parts], checkpoint.weights.tensor(name).float32()
        if pieces[0].shape == whole.shape:
            assert torch.equal(pieces[0], whole)
            continue
        assert tuple(pieces[0].shape) == shapes[name]
        cut = next(dim for dim in range(whole.dim()) if pieces[0].shape[dim] != whole.shape[dim])
        assert torch.equal(torch.cat(pieces, cut), whole)


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"world_size": 4}, ModelError, "worldSize: 4 ranks cannot share 2 KV heads evenly"),
        ({"world_size": 2, "backend": "cpu"}, BadRequest, "world_size: the cpu backend's threads share one rank"),
        ({"device": "npu"}, ModelError, "device: torch .* sees no npu here"),
        ({"device": "tpu"}, BadRequest, "device: must be cpu, cuda or npu, got 'tpu'"),
        ({"device": "cuda", "backend": "cpu"}, BadRequest, "device: the cpu backend computes on the CPU"),
        ({"world_size": 0}, BadRequest, "world_size: must be at least 1, got 0"),
    ],
)
def test_a_model_that_cannot_be_opened_so_is_one_clear_error(tmp_path, fields, error, words):
    path = save(tiny_model("llama"), tmp_path)
    with pytest.raises(error, match=words):
        RankExecutor(EngineConfig(model=str(path), **{"backend": "reference", **fields}), list)


def test_whichever_rank_is_killed_whenever_every_request_is_answered():
    """Whole, or by an error; and the group comes back each time."""
    dice = random.Random(11)

    async def ask(engine: EngineThread, name: str) -> bool:
        request = Request(name, tuple(range(1, 30)), SamplingParams(seed=7, max_tokens=30, ignore_eos=True))
        tokens: list[int] = []
        try:
            async for delta in engine.stream(request):
                tokens += delta.token_ids
        except (GenerationFailed, Unavailable):
            return False
        assert tokens == fake_answer(request.prompt_ids, request.params, 7, 30)
        return True

    async def body() -> None:
        config = EngineConfig(backend="fake", num_blocks=256, fake_step_s=0.001, world_size=3)
        engine = open_engine(config, ByteTokenizer)
        engine.start(asyncio.get_running_loop())
        try:
            for kill in range(NUM_KILLS):
                executor = engine._executor
                assert isinstance(executor, RankExecutor)
                victim = dice.choice(executor.pids)
                tasks = [asyncio.create_task(ask(engine, f"{kill}-{i}")) for i in range(8)]
                await asyncio.sleep(dice.uniform(0, 0.04))
                os.kill(victim, signal.SIGKILL)
                await asyncio.wait_for(asyncio.gather(*tasks), 20)
                async with asyncio.timeout(20):
                    while engine.stats().total_restarts <= kill or not engine.is_ready:
                        await asyncio.sleep(0.005)
                assert victim not in executor.pids
                assert await asyncio.wait_for(ask(engine, f"{kill}-after"), 20)
        finally:
            await asyncio.to_thread(engine.close)

    asyncio.run(body())
