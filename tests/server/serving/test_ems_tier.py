"""EMS as the outer KV tier of a rank process, over a real agent: restarts, kills and stops. Answers are always correct.

The fake model reads every token back from its KV cache, so one wrong byte changes an answer.
"""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ems.circuit import Circuit
from ems.native import library
from ems.native.build import BLOCKS
from kvloom.contract.config import EngineConfig, TierConfig
from kvloom.contract.errors import BadRequest, ModelError
from kvloom.contract.messages import Moved, Transfer
from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.thread import EngineThread
from kvloom.pool.auth import new_credential
from kvloom.rank.fake import ByteTokenizer, fake_answer
from kvloom.rank.opening import open_engine
from kvloom.rank.tier import ems as tier_of_ems
from kvloom.rank.tier.ems import EmsTier, open_tier
from kvloom.rank.tier.kvmemory import KvMemory
from tests.support.pool.agents import SECRET, running_agent
from tests.support.pool.faults import AgentProcess
from tests.support.waiting import WAIT_S, until

TIMEOUT_S = 30.0  # for transfers that succeed
SHORT_S = 2.0  # for calls that run into it, beside some that succeed
FACTORY = "kvloom.rank.tier.ems:open_tier"
PARAMS = SamplingParams(temperature=0, ignore_eos=True, max_tokens=20)
NUMBERS = count()  # for requests whose ids do not matter
NUM_BLOCKS = 64  # blocks of the prompts below: a prompt takes 13


def run(body: Callable[[EngineThread], Awaitable[None]], socket: Path, timeout_s: float = TIMEOUT_S) -> None:
    """Runs `body` against an engine with the fake model in a rank process, with EMS on `socket` as its tier."""

    async def main() -> None:
        tier = TierConfig(FACTORY, timeout_s, {"socket": str(socket)})
        config = EngineConfig(backend="fake", num_blocks=NUM_BLOCKS, kv_tier=tier)
        engine = open_engine(config, ByteTokenizer)
        engine.start(asyncio.get_running_loop())
        try:
            await asyncio.wait_for(body(engine), 2 * WAIT_S)
        finally:
            await asyncio.to_thread(engine.close)

    asyncio.run(main())


async def ask(engine: EngineThread, number: int, name: str = "") -> int:
    """Answers a prompt of 200 tokens that is unique to its number; returns how many tokens came from a cache."""
    prompt = tuple((i * (number + 3) + number) % 251 for i in range(200))
    request = Request(name or f"r{number}-{next(NUMBERS)}", prompt, PARAMS)
    async with aclosing(engine.stream(request)) as stream:
        deltas = [delta async for delta in stream]
    tokens = [token for delta in deltas for token in delta.token_ids]
    assert tokens == fake_answer(prompt, PARAMS, 0, 20), "a wrong answer"
    return deltas[-1].num_cached_tokens


async def loaded(engine: EngineThread, count: int) -> None:
    """The thread publishes its statistics after the deltas of a step."""
    while engine.stats().total_tier_loaded_blocks < count:
        await asyncio.sleep(0.01)
    assert engine.stats().total_tier_loaded_blocks == count


async def saved(engine: EngineThread, count: int) -> None:
    while engine.stats().total_tier_saved_blocks < count:
        await asyncio.sleep(0.01)


async def used(engine: EngineThread, number: int) -> int:
    """Sends prompts from this number on until the pool is connected and stores them; returns the next number."""
    before = engine.stats().total_tier_saved_blocks
    while engine.stats().total_tier_saved_blocks == before:
        await ask(engine, number)
        number += 1
        await asyncio.sleep(0.05)
    return number


@pytest.fixture
def agent(tmp_path) -> Iterator[AgentProcess]:
    with AgentProcess(tmp_path / "ems.sock") as process:
        yield process


def test_a_restarted_engine_takes_its_prefixes_from_the_pool(agent):
    async def cold(engine: EngineThread) -> None:
        assert await ask(engine, 1) == 0
        await saved(engine, 13)

    async def warm(engine: EngineThread) -> None:
        assert await ask(engine, 1) == 192
        await loaded(engine, 12)

    run(cold, agent.socket)
    run(warm, agent.socket)


def test_blocks_evicted_here_come_back_from_the_pool(agent):
    async def body(engine: EngineThread) -> None:
        for number in range(8):  # more than the engine's own blocks hold
            await ask(engine, number)
        await saved(engine, 8 * 13)
        assert await ask(engine, 0) == 192
        await loaded(engine, 12)

    run(body, agent.socket)


def test_a_killed_pool_changes_no_answer_and_one_that_comes_back_is_used_again(agent):
    async def body(engine: EngineThread) -> None:
        await ask(engine, 1)
        await saved(engine, 13)
        running = [asyncio.create_task(ask(engine, number)) for number in range(2, 12)]
        await saved(engine, 14)
        agent.kill()
        await asyncio.gather(*running)
        await asyncio.gather(*(ask(engine, number) for number in range(12, 20)))
        agent.start()
        await used(engine, 20)

    run(body, agent.socket)


def test_a_stopped_pool_changes_no_answer(agent):
    async def body(engine: EngineThread) -> None:
        number = await used(engine, 1)
        with agent.stopped():
            for other in range(number, number + 6):
                await ask(engine, other)

    run(body, agent.socket, SHORT_S)


def test_a_stopped_pool_costs_its_deadline_once_and_then_nothing(agent):
    """A transfer that the open breaker refuses is complete when it is polled at once."""
    tier = open_tier(memory()[0], TierConfig(FACTORY, SHORT_S, {"socket": str(agent.socket)}))
    until(lambda: move(tier, Transfer(1, [1], [b"k"]), is_load=False) == Moved(1, 1))  # a busy machine may be late
    with agent.stopped():
        assert move(tier, Transfer(2, [2], [b"k"]), is_load=True) == Moved(2, 0)
        for number in range(3, 8):
            tier.load(Transfer(number, [2], [b"k"]))
            assert tier.poll() == [Moved(number, 0)]
    tier.close()


def test_a_pool_that_starts_after_the_engine_is_found(tmp_path):
    async def body(engine: EngineThread) -> None:
        assert await ask(engine, 1) == 0
        with AgentProcess(tmp_path / "ems.sock"):
            await used(engine, 2)

    run(body, tmp_path / "ems.sock", SHORT_S)


def memory(layout: str = "plain", model: str = "m") -> tuple[KvMemory, np.ndarray]:
    kv = np.arange(8 * 4 * 3, dtype=np.int64).reshape(8, 4, 3)
    return KvMemory([[kv]], 8, 4, 4 * 3 * 8, lambda block: [kv[block].data], model, layout), kv


def move(tier: EmsTier, transfer: Transfer, is_load: bool) -> Moved:
    (tier.load if is_load else tier.save)(transfer)
    found: list[Moved] = []
    until(lambda: bool(found.extend(tier.poll()) or found))
    return found[0]


def test_the_library_is_compiled_before_the_pool_is_looked_for(monkeypatch):
    """Compiling takes seconds and a prompt waits half a second: blocks of prompts that came earlier would not be
    saved.
    """
    found: list[bool] = []

    class Looking(Circuit):
        def __init__(self, *arguments: Any) -> None:
            found.append(BLOCKS.name in library._loaded)
            super().__init__(*arguments)

    monkeypatch.setattr(library, "_loaded", {})
    monkeypatch.setattr(tier_of_ems, "Circuit", Looking)
    with running_agent() as agent:
        open_tier(memory()[0], TierConfig(FACTORY, TIMEOUT_S, {"socket": str(agent.config.socket)})).close()
    assert found == [True]


def test_blocks_are_found_under_their_model_and_layout_only():
    keys = [bytes([i]) * 32 for i in range(3)]
    with running_agent() as agent:
        config = TierConfig(FACTORY, TIMEOUT_S, {"socket": str(agent.config.socket)})
        kv, data = memory()
        tier = open_tier(kv, config)
        assert move(tier, Transfer(1, [2, 5, 1], keys), is_load=False) == Moved(1, 3)
        tier.close()
        for other, _ in (memory(layout="turned"), memory(model="n")):
            tier = open_tier(other, config)
            assert move(tier, Transfer(1, [0, 1, 2], keys), is_load=True) == Moved(1, 0)
            tier.close()
        again, copy = memory()
        copy[:] = -1
        tier = open_tier(again, config)
        assert move(tier, Transfer(7, [0, 3, 4, 6], [*keys, b"x"]), is_load=True) == Moved(7, 3)
        tier.close()
        assert (copy[[0, 3, 4]] == data[[2, 5, 1]]).all()
        assert (copy[[1, 2, 5, 6, 7]] == -1).all()


def test_a_pool_with_keys_takes_the_one_in_the_file(tmp_path):
    access_key = "k" * 32
    file = tmp_path / "key"
    file.write_text(access_key + "\n")
    with running_agent(is_open=False, secret=SECRET) as agent:
        agent.node.replace_credentials([new_credential("tenant-a", "tenant-a", access_key)])
        options = {"socket": str(agent.config.socket), "access_id": "tenant-a"}
        for more, is_up in ((({"access_key_file": str(file)}), True), ({}, False)):
            tier = open_tier(memory()[0], TierConfig(FACTORY, TIMEOUT_S if is_up else 0.5, {**options, **more}))
            assert tier.is_up is is_up
            assert move(tier, Transfer(1, [1], [b"k"]), is_load=False) == Moved(1, int(is_up))
            tier.close()


def test_the_circuit_asks_on_a_thread_until_the_pool_is_healthy_and_again_after_a_failure():
    answers = iter([False, False, True, True])
    circuit = Circuit(lambda: next(answers), first_pause_s=0.001)
    until(lambda: circuit.is_up)
    circuit.failed("gone")
    assert not circuit.is_up
    until(lambda: circuit.is_up)
    circuit.close()
    assert not circuit.is_up
    assert next(answers, None) is None


def test_a_start_waits_for_the_first_look_however_slow_it_is():
    beginning, answer = threading.Event(), threading.Event()

    def connect() -> bool:
        beginning.set()
        return answer.wait(WAIT_S)

    circuit = Circuit(connect)
    starting = threading.Thread(target=circuit.wait_for_first_look)
    starting.start()
    assert beginning.wait(WAIT_S)
    assert starting.is_alive()
    assert not circuit.is_up
    answer.set()
    starting.join(WAIT_S)
    assert circuit.is_up
    circuit.close()


def test_a_start_does_not_wait_for_a_pool_that_is_not_there():
    circuit = Circuit(lambda: False, first_pause_s=3600.0)
    circuit.wait_for_first_look()
    assert not circuit.is_up
    circuit.close()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"sockets": "x"}, "kv_tier.options.sockets: is not known; known are socket, access_id, access_key_file"),
        ({"access_id": "A b"}, "kv_tier.options.access_id: must be 1 to 512 characters of 0-9 a-z . - _"),
        (
            {"access_key_file": "/nowhere/key"},
            "kv_tier.options.access_key_file: /nowhere/key cannot be read: No such file or directory",
        ),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(options, problem):
    with pytest.raises(BadRequest) as caught:
        open_tier(memory()[0], TierConfig(FACTORY, 1.0, options))
    assert str(caught.value) == problem


def test_a_rank_whose_tier_cannot_be_opened_says_so_to_whoever_starts_it():
    tier = TierConfig(FACTORY, 1.0, {"sockets": "x"})
    with pytest.raises(ModelError, match=r"^kv_tier\.options\.sockets: is not known; known are socket"):
        open_engine(EngineConfig(backend="fake", kv_tier=tier), ByteTokenizer)


def test_tensors_of_torch_are_used_in_place():
    kv = torch.zeros(4, 2, 3)
    with running_agent() as agent:
        memory = KvMemory([[kv]], 4, 2, 2 * 3 * 4, lambda block: [kv[block].numpy().data], "m", "l")
        tier = open_tier(memory, TierConfig(FACTORY, TIMEOUT_S, {"socket": str(agent.config.socket)}))
        kv[1] = 5.0
        assert move(tier, Transfer(1, [1], [b"a"]), is_load=False) == Moved(1, 1)
        assert move(tier, Transfer(2, [3], [b"a"]), is_load=True) == Moved(2, 1)
        assert (kv[3] == 5.0).all()
        tier.close()
    assert "EMS_SOCKET" in os.environ


@pytest.fixture(autouse=True)
def _socket_of_the_environment(monkeypatch):
    monkeypatch.setenv("EMS_SOCKET", "")
