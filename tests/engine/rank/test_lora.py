"""LoRA adapters in the engine: whose blocks are shared, and what outlives an unload or a restart."""

import asyncio
import os
import shutil
import signal
from contextlib import suppress
from dataclasses import replace

import pytest

from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import BadRequest, NotFound, Unavailable
from kvloom.contract.request import FinishReason, Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.adapters import MAX_ADAPTERS
from kvloom.engine.engine import Engine
from kvloom.engine.schedule.blocks import adapter_salt, extend_chain
from kvloom.rank.fake import ByteTokenizer, fake_answer
from kvloom.rank.opening import open_engine
from tests.support.engine.engines import fake_engine, run_all, tokens_of
from tests.support.engine.executors import opened
from tests.support.models.adapters import TINY_SHAPES, adapted, make_adapter
from tests.support.models.checkpoints import save, tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
PROMPT = tuple(range(1, 22))


def answer(adapter="", prompt=PROMPT, params=GREEDY):
    return fake_answer(prompt, params, 0, params.max_tokens, adapter)


@pytest.fixture
def folders(tmp_path):
    return [str(make_adapter(tmp_path / str(seed), TINY_SHAPES, seed)) for seed in range(4)]


# -- which requests share blocks


def test_no_salt_of_a_request_leads_to_the_blocks_of_an_adapter():
    roots = set()
    for salt in (adapter_salt("", ""), adapter_salt("a", ""), adapter_salt("", "ff"), adapter_salt("a", "ff")):
        hashes = []
        extend_chain(hashes, [1, 2], 2, salt)
        roots.add(hashes[0])
    assert len(roots) == 4
    with pytest.raises(BadRequest, match="cache_salt: must not contain NUL"):
        fake_engine().add(Request("r", PROMPT, GREEDY, cache_salt="ff\0a"))


def test_the_prefix_cache_never_mixes_adapters(folders):
    engine = fake_engine(num_blocks=128)
    adapters = [engine.adapters.load(path) for path in folders[:3]]
    for round in range(2):
        for index, id in enumerate([0, *(adapter.id for adapter in adapters)]):
            name = f"{round}-{index}"
            deltas = run_all(engine, Request(name, PROMPT, GREEDY, adapter=id))[name]
            assert tokens_of(deltas) == answer(adapters[index - 1].info.digest if index else "")
            assert deltas[-1].num_cached_tokens == (20 if round else 0)


def test_the_same_adapter_loaded_again_finds_its_blocks_and_a_changed_one_does_not(folders):
    engine = fake_engine()
    first = engine.adapters.load(folders[1])
    run_all(engine, Request("a", PROMPT, GREEDY, adapter=first.id))
    again, other = engine.adapters.load(folders[1]), engine.adapters.load(folders[2])
    found = run_all(
        engine, Request("b", PROMPT, GREEDY, adapter=again.id), Request("c", PROMPT, GREEDY, adapter=other.id)
    )
    assert found["b"][-1].num_cached_tokens == 20
    assert found["c"][-1].num_cached_tokens == 0
    assert tokens_of(found["c"]) == answer(other.info.digest)


@pytest.mark.parametrize("config", [{}, {"max_batch": 2}, {"num_speculative_tokens": 4}])
@pytest.mark.parametrize("num_host_blocks", [0, 40])
def test_a_mixed_batch_with_preemption_gives_each_the_answer_it_has_alone(folders, config, num_host_blocks):
    engine = fake_engine(num_blocks=26, num_host_blocks=num_host_blocks, **config)
    adapters = [None, *(engine.adapters.load(path) for path in folders[:3])]
    params = replace(GREEDY, max_tokens=30)
    requests = [
        Request(str(i), PROMPT[: 9 + i], params, adapter=adapters[i % 4].id if adapters[i % 4] else 0) for i in range(8)
    ]
    found = run_all(engine, *requests)
    for i, request in enumerate(requests):
        digest = adapters[i % 4].info.digest if adapters[i % 4] else ""
        assert tokens_of(found[request.id]) == answer(digest, request.prompt_ids, params)
    assert config or engine.stats().total_preemptions > 0


# -- unloading


def test_what_runs_with_an_unloaded_adapter_finishes_and_what_comes_is_refused(folders):
    engine = fake_engine()
    adapter = engine.adapters.load(folders[0])
    marks = engine._executor._runner._marks
    engine.add(Request("a", PROMPT, GREEDY, adapter=adapter.id))
    found = [*engine.step(), *engine.step()]
    engine.adapters.unload(adapter.id)
    engine.adapters.unload(99)
    assert adapter.id in marks
    with pytest.raises(NotFound, match="the adapter was unloaded"):
        engine.add(Request("b", PROMPT, GREEDY, adapter=adapter.id))
    found += run_all(engine)["a"]
    assert tokens_of(found) == answer(adapter.info.digest)
    assert [delta.finish_reason for delta in found if delta.finish_reason] == [FinishReason.LENGTH]
    assert adapter.id not in marks
    assert engine.adapters.load(folders[0]).id != adapter.id


def test_an_idle_or_aborted_adapter_goes_at_once(folders):
    engine = fake_engine()
    marks = engine._executor._runner._marks
    idle, aborted = engine.adapters.load(folders[0]), engine.adapters.load(folders[1])
    engine.add(Request("a", PROMPT, GREEDY, adapter=aborted.id))
    engine.step()
    engine.adapters.unload(idle.id)
    engine.adapters.unload(aborted.id)
    assert idle.id not in marks
    engine.abort("a")
    run_all(engine)
    assert set(marks) == {0}


def test_so_many_adapters_and_no_more(folders):
    engine = fake_engine()
    ids = [engine.adapters.load(folders[0]).id for _ in range(MAX_ADAPTERS)]
    with pytest.raises(BadRequest, match=f"lora_path: {MAX_ADAPTERS} adapters are loaded already"):
        engine.adapters.load(folders[0])
    engine.adapters.unload(ids[0])
    engine.adapters.load(folders[0])


# -- ranks


def test_a_killed_rank_comes_back_with_its_adapters(folders, tmp_path):
    """Every request continues; an adapter whose files are gone by then is refused with the reason."""
    has_begun = asyncio.Event()

    async def ask(engine, name, adapter):
        request = Request(name, PROMPT, replace(GREEDY, max_tokens=30), adapter=adapter.id if adapter else 0)
        tokens = []
        async for delta in engine.stream(request):
            tokens += delta.token_ids
            has_begun.set()
        assert tokens == answer(adapter.info.digest if adapter else "", params=request.params)
        return True

    async def body():
        config = EngineConfig(backend="fake", num_blocks=256, fake_step_s=0.001, world_size=2)
        engine = open_engine(config, ByteTokenizer)
        engine.start(asyncio.get_running_loop())
        try:
            adapters = [None, *[await engine.load_adapter(path) for path in folders]]
            with pytest.raises(BadRequest, match=r"lora_path: adapter_config.json cannot be read"):
                await engine.load_adapter(str(tmp_path / "nowhere"))
            shutil.rmtree(folders[3])
            for kill in range(2):
                tasks = [asyncio.create_task(ask(engine, f"{kill}-{i}", adapters[i % 4])) for i in range(8)]
                has_begun.clear()
                await has_begun.wait()
                os.kill(engine._executor.pids[kill], signal.SIGKILL)
                await asyncio.wait_for(asyncio.gather(*tasks), 120)
                async with asyncio.timeout(120):
                    while engine.stats().total_restarts <= kill or not engine.is_ready:
                        await asyncio.sleep(0.005)
                assert all([await ask(engine, f"{kill}-after-{i}", adapters[i]) for i in range(4)])
                with pytest.raises(
                    NotFound, match=r"lost when the model restarted: adapter_config.json cannot be read"
                ):
                    await ask(engine, f"{kill}-lost", adapters[4])
            engine.unload_adapter(adapters[1].id)
            with pytest.raises(NotFound, match="unloaded"):
                await ask(engine, "gone", adapters[1])
        finally:
            await asyncio.to_thread(engine.close)
        with pytest.raises(Unavailable):
            await engine.load_adapter(folders[0])

    asyncio.run(body())


def test_adapters_come_and_go_under_running_streams(folders):
    async def body():
        engine = open_engine(EngineConfig(backend="fake", num_blocks=256, fake_step_s=0.0005), ByteTokenizer)
        engine.start(asyncio.get_running_loop())

        async def stream(name, adapter, has_begun):
            params, deltas = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), []
            async for delta in engine.stream(Request(name, PROMPT, params, adapter=adapter.id)):
                deltas.append(delta)
                has_begun.set()
            assert tokens_of(deltas) == answer(adapter.info.digest, params=params)
            assert [bool(delta.finish_reason) for delta in deltas].count(True) == 1

        try:
            tasks = []
            for i in range(20):
                adapter = await engine.load_adapter(folders[i % 4])
                begun = [asyncio.Event(), asyncio.Event()]
                tasks += [asyncio.create_task(stream(f"{i}-{k}", adapter, begun[k])) for k in range(2)]
                await asyncio.gather(*(one.wait() for one in begun))
                engine.unload_adapter(adapter.id)
            await asyncio.gather(*tasks)
            load = asyncio.create_task(engine.load_adapter(folders[0]))
            await asyncio.sleep(0)
            load.cancel()
            with suppress(asyncio.CancelledError):
                await load
            last = await engine.load_adapter(folders[1])
            while set(engine._engine.adapters._loaded) != {last.id}:
                await asyncio.sleep(0.005)
        finally:
            await asyncio.to_thread(engine.close)

    asyncio.run(body())


@pytest.mark.parametrize("name", ["llama", "qwen2", "deepseek v2, lite", "qwen3.5", "granite 4"])
def test_two_ranks_with_an_adapter_give_the_tokens_of_one(tmp_path, name):
    model, folder = tiny_model(name), str(tmp_path / "adapter")
    path = save(model, tmp_path / "model")
    adapted(model, tmp_path / "adapter")
    found = []
    for world_size in (1, 2):
        config = EngineConfig(
            model=str(path), backend="reference", dtype="float32", num_blocks=64, world_size=world_size
        )
        with opened(config) as executor:
            engine = Engine(config, executor, ByteTokenizer())
            adapter = engine.adapters.load(folder)
            requests = [Request(f"r{id}", PROMPT, replace(GREEDY, max_tokens=20), adapter=id) for id in (0, adapter.id)]
            deltas = run_all(engine, *requests)
            found.append([tokens_of(deltas[request.id]) for request in requests])
            if name == "llama":
                with pytest.raises(BadRequest, match=r"ask for \[4, 64\]"):
                    engine.adapters.load(str(make_adapter(tmp_path / "misfit", {"layers.0.q": (64, 32)})))
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]
