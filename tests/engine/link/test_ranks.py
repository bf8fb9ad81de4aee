"""Tensor parallelism: several rank processes give the answers of one, and are restarted together when one dies."""

import asyncio
import contextlib
import os
import random
import resource
import signal
import socket
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.contract.config import EngineConfig, TierConfig
from kvloom.contract.errors import BadRequest, ModelError
from kvloom.contract.lifecycle import Ready
from kvloom.contract.messages import Batch, RankInfo, RankMessage, RankSetup
from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.engine import Engine
from kvloom.engine.link.ranks import RankExecutor
from kvloom.engine.thread import EngineThread
from kvloom.net.listening import allow_descriptors
from kvloom.processes.channel import Channel
from kvloom.rank.fake import ByteTokenizer, fake_answer
from kvloom.rank.loading import check_sharing
from kvloom.rank.opening import open_engine, open_ranks
from kvloom.rank.parallel.shard import ShardedWeights, shard_spec
from tests.support.engine.engines import run_all
from tests.support.engine.executors import opened
from tests.support.models.checkpoints import save, tiny_model
from tests.support.pool.agents import blocks_of, running_agent

NUM_KILLS = int(os.environ.get("KVLOOM_TEST_RANK_KILLS", "6"))
LOGPROB_TOLERANCE = 1e-4  # float32 sums are added in another order
PARAMS = (
    SamplingParams(temperature=0, max_tokens=20, logprobs=3),
    SamplingParams(temperature=0, max_tokens=12, prompt_logprobs=0),
    SamplingParams(temperature=0, repetition_penalty=1.2, max_tokens=20),
)


def answers(config: EngineConfig) -> tuple[list[list[int]], list[float]]:
    """Tokens of three requests that run together, and their log-probabilities."""
    requests = [Request(f"r{i}", tuple(range(3 + i, 40 + i)), params) for i, params in enumerate(PARAMS)]
    with opened(config) as executor:
        found = run_all(Engine(config, executor, ByteTokenizer()), *requests)
    values = [value.logprob for request in requests for delta in found[request.id] for value in delta.logprobs]
    for delta in found["r1"]:
        values += [value.logprob for value in delta.prompt_logprobs or () if value is not None]
    return [[token for delta in found[request.id] for token in delta.token_ids] for request in requests], values


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "qwen3", "qwen2 moe", "gpt-oss", "gemma4, shared keys and inputs of layers"),
        *("qwen3.5", "lfm2", "granite 4", "nemotron h, experts", "falcon h1, norms", "kimi linear"),
    ],
)
def test_two_ranks_give_the_tokens_of_one(tmp_path, name, request):
    if name == "llama":
        request.getfixturevalue("really_started")
    path = save(tiny_model(name), tmp_path)
    config = EngineConfig(model=str(path), backend="reference", dtype="float32", num_blocks=64)
    alone, alone_values = answers(config)
    shared, shared_values = answers(replace(config, world_size=2))
    assert shared == alone
    assert torch.allclose(torch.tensor(shared_values), torch.tensor(alone_values), atol=LOGPROB_TOLERANCE, rtol=0)


def test_each_rank_keeps_its_part_of_a_block_in_the_pool(tmp_path):
    """Blocks saved by another pair of ranks are loaded; a block counts only if both ranks' parts are in the pool."""
    path = save(tiny_model("llama"), tmp_path)
    greedy = SamplingParams(temperature=0, max_tokens=12)
    requests = [Request(f"r{i}", tuple(range(3 + i, 60 + i)), greedy) for i in range(3)]

    def run(config: EngineConfig) -> tuple[list[list[int]], int]:
        with opened(config) as executor:
            engine = Engine(config, executor, ByteTokenizer())
            found = run_all(engine, *requests, max_steps=10**7)
            loaded = engine.stats().total_tier_loaded_blocks
        return [[token for delta in found[r.id] for token in delta.token_ids] for r in requests], loaded

    with running_agent(pool_bytes=32 << 20) as agent:
        tier = TierConfig("kvloom.rank.tier.ems:open_tier", 5.0, {"socket": str(agent.config.socket)}, True)
        config = EngineConfig(
            model=str(path), backend="reference", dtype="float32", num_blocks=64, world_size=2, kv_tier=tier
        )
        want, cold = run(config)
        pool = agent.node.pools()[0]
        first = blocks_of(pool)[0]  # one rank's part of the first block of a request
        pool.view(first.offset, first.length)[:] ^= 255
        assert pool.distrust(first)
        again, warm = run(config)
        assert (again, cold) == (want, 0)
        assert warm == 2 * (57 // 16)  # the whole blocks of the other two requests


@pytest.mark.parametrize("name", ["qwen2", "granite 4", "qwen3.5", "lfm2", "kimi linear"])
def test_the_parts_of_the_ranks_are_the_whole(tmp_path, name):
    checkpoint = open_checkpoint(save(tiny_model(name), tmp_path))
    spec = shard_spec(checkpoint.spec, 2)
    parts = [ShardedWeights(checkpoint.weights, checkpoint.spec, rank, 2) for rank in range(2)]
    shapes = spec.tensor_shapes()
    for name in parts[0].names():
        pieces, whole = [part.float32(name) for part in parts], checkpoint.weights.tensor(name).float32()
        if pieces[0].shape == whole.shape:
            assert np.array_equal(pieces[0], whole)
            continue
        assert tuple(pieces[0].shape) == shapes[name]
        cut = next(dim for dim in range(whole.ndim) if pieces[0].shape[dim] != whole.shape[dim])
        joined = np.concatenate(pieces, cut)
        assert np.array_equal(*(np.sort(each, cut) for each in (joined, whole)))
        has_kinds = name.endswith((".conv_in", ".conv", ".conv_bias", ".short_in"))  # of rows, each of which is cut
        assert has_kinds or np.array_equal(joined, whole)


def test_ranks_whose_caches_differ_are_refused(monkeypatch):
    """The engine numbers blocks once for all ranks: a rank with another layout would move and compute other bytes."""
    sizes = iter((16, 32))
    ends: list[socket.socket] = []

    def spawn(self: RankExecutor, place: int) -> None:
        ours, theirs = socket.socketpair()
        ends.append(theirs)
        Channel(theirs, RankSetup).send(Ready(RankInfo(64, next(sizes), 258, 100, "fake")))
        self._channels.append(Channel(ours, RankMessage))

    monkeypatch.setattr(RankExecutor, "_spawn", spawn)
    differ = r"differ in blocks, tokens, bytes, host blocks, states or blocks of windows: \[64, 16, .*\]; \[64, 32, "
    with pytest.raises(ModelError, match=differ):
        open_ranks(EngineConfig(backend="fake", world_size=2), list)
    for end in ends:
        end.close()


def test_a_process_that_the_system_refuses_is_told_as_such():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        highest = stack.enter_context(open(os.devnull, "rb")).fileno()
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, before[1]))
        with pytest.raises(ModelError, match="failed: the system has no room for its process: Too many open files"):
            open_ranks(EngineConfig(backend="fake"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_start_and_restart_in_a_process_with_thousands_of_open_files(ranks):
    """A server has as many as clients are connected with it; select() of the C library knows 1,024."""
    allow_descriptors()
    with contextlib.ExitStack() as stack:
        for _ in range(1100):
            stack.enter_context(open(os.devnull, "rb"))
        executor = open_ranks(EngineConfig(backend="fake", num_blocks=8, world_size=ranks))
        stack.callback(executor.close)
        executor.restart()
        executor.submit(Batch([], [], []))
        assert executor.collect().samples == []


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
        open_ranks(EngineConfig(model=str(path), **{"backend": "reference", **fields}), list)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"world_size": 3}, "worldSize: 3 ranks cannot share 2 groups of heads of Mamba-2 evenly"),
        (
            {"world_size": 2, "kv_tier": TierConfig("a:b")},
            "its layers keep states, which several ranks .worldSize. do not",
        ),
    ],
)
def test_states_that_ranks_cannot_share_are_refused(tmp_path, fields, words):
    path = save(tiny_model("mamba2"), tmp_path)
    with pytest.raises(ModelError, match=words):
        check_sharing(EngineConfig(model=str(path), backend="reference", **fields), open_checkpoint(path).spec)


def test_whichever_rank_is_killed_whenever_every_request_is_answered():
    """Every answer is the undisturbed one, and the group restarts each time."""
    dice = random.Random(11)
    seen: asyncio.Queue[int] = asyncio.Queue()

    async def ask(engine: EngineThread, name: str) -> None:
        request = Request(name, tuple(range(1, 30)), SamplingParams(seed=7, max_tokens=30, ignore_eos=True))
        tokens: list[int] = []
        async for delta in engine.stream(request):
            tokens += delta.token_ids
            seen.put_nowait(len(delta.token_ids))
        assert tokens == fake_answer(request.prompt_ids, request.params, 7, 30)

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
                for _ in range(dice.randrange(200)):  # of 240 tokens in all
                    await asyncio.wait_for(seen.get(), 120)
                os.kill(victim, signal.SIGKILL)
                await asyncio.wait_for(asyncio.gather(*tasks), 120)
                async with asyncio.timeout(120):
                    while engine.stats().total_restarts <= kill or not engine.is_ready:
                        await asyncio.sleep(0.005)
                assert victim not in executor.pids
                await asyncio.wait_for(ask(engine, f"{kill}-after"), 120)
                while not seen.empty():
                    seen.get_nowait()
        finally:
            await asyncio.to_thread(engine.close)

    asyncio.run(body())
