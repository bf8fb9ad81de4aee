"""KvPool: values by key, a result for each; reading one with another length, layout or model is a miss."""

import asyncio
import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import ems
from ems import CcConfig, CcKvOption, EmsConfig, EmsErrorCode, EmsException, KvBufferWrapper, KvPool, KvStatus
from ems.native import functions, line
from kvloom.pool.agent import Agent
from tests.support.pool.agents import blocks_of, running_agent, two_agents
from tests.support.pool.faults import AgentProcess
from tests.support.waiting import WAIT_S, until

STORED, PRESENT, CONFLICT = KvStatus.STORED, KvStatus.PRESENT, KvStatus.CONFLICT


def a_config(**identity: Any) -> EmsConfig:
    return EmsConfig(cc_config=CcConfig(**{"rank_id": 0, "device_id": 0, "model_id": "m", **identity}))


def values_of(count: int, size: int, seed: int = 0) -> list[bytes]:
    dice = np.random.default_rng(seed)
    return [dice.bytes(size) for _ in range(count)]


@contextlib.contextmanager
def opened(agent: Agent, layout: str = "", **identity: Any) -> Iterator[KvPool]:
    with ems.open_pool(a_config(**identity), layout, agent.config.socket) as pool:
        yield pool


@pytest.fixture(autouse=True, params=[line.native_line, lambda _fd, _board: None], ids=["in C++", "in Python"])
def _moved(request, monkeypatch):
    functions.functions()  # compiled now, because calls do not wait for the compiler
    monkeypatch.setattr("ems.transport.native_line", request.param)


@pytest.fixture
def pool(agent: Agent) -> Iterator[KvPool]:
    with opened(agent) as running:
        yield running


def test_each_key_has_its_own_result(pool):
    keys, values = [f"k{i}" for i in range(200)], values_of(200, 5000)
    assert pool.put(keys[::2], values[::2]) == [STORED] * 100
    targets = [bytearray(5000) for _ in keys]
    assert pool.get(keys, targets) == [i % 2 == 0 for i in range(200)]
    assert all(bytes(target) == (value if i % 2 == 0 else bytes(5000)) for i, (target, value) in
               enumerate(zip(targets, values, strict=True)))  # fmt: skip
    assert pool.exists(keys, [5000] * 200) == [i % 2 == 0 for i in range(200)]
    assert (pool.put([], []), pool.get([], []), pool.exists([], [])) == ([], [], [])


def test_a_value_of_another_length_is_a_miss(pool):
    pool.put(["k"], [b"four"])
    target = bytearray(b"xxxxx")
    assert pool.get(["k"], [target]) == [False]
    assert target == b"xxxxx"
    assert pool.exists(["k", "k"], [4, 5]) == [True, False]
    assert pool.put(["k"], [b"fives"]) == [STORED]
    assert pool.get(["k", "k"], [target, small := bytearray(4)]) == [True, True]
    assert (target, small) == (b"fives", b"four")


@pytest.mark.parametrize(
    "identity",
    [
        {"layout": "float16|NHD"},
        {"model_id": "other"},
        {"llm_engine": "other"},
        {"kvcache_type": "MLA"},
        {"tp_world_size": 2},
        {"tp_world_size": 2, "rank_in_tp_group": 1},
        {"pp_world_size": 2, "rank_in_pp_group": 1},
    ],
)
def test_other_layouts_and_models_see_nothing_of_it(agent, pool, identity):
    pool.put(["k"], [b"here"])
    with opened(agent, **identity) as other:
        assert other.exists(["k"], [4]) == [False]
        assert other.put(["k"], [b"mine"]) == [STORED]
    assert pool.get(["k"], [target := bytearray(4)]) == [True]
    assert target == b"here"


def test_ranks_of_mla_share(agent):
    with (
        opened(agent, kvcache_type="MLA", tp_world_size=2, rank_in_tp_group=0) as one,
        opened(agent, kvcache_type="MLA", tp_world_size=2, rank_in_tp_group=1) as other,
    ):
        one.put(["k"], [b"here"])
        assert other.exists(["k"], [4]) == [True]


def test_the_first_put_of_a_key_wins(pool):
    assert pool.put(["k"], [b"one."]) == [STORED]
    assert pool.put(["k", "k"], [b"one.", b"two."]) == [PRESENT, CONFLICT]
    assert pool.get(["k"], [target := bytearray(4)]) == [True]
    assert target == b"one."


def test_a_key_may_come_twice_in_a_batch(pool):
    assert pool.put(["a", "a", "b", "a"], [b"1", b"1", b"2", b"3"]) == [STORED, PRESENT, STORED, CONFLICT]
    targets = [bytearray(1) for _ in range(4)]
    assert pool.get(["a", "b", "a", "c"], targets) == [True, True, True, False]
    assert b"".join(targets) == b"121\0"


HOSTILE: list[Any] = ["", b"\0", b"\0\0", "\0a", b"a\0", "é", b"\xff\xfe", "x" * (1 << 20), b"x" * ((1 << 20) + 1)]


def test_hostile_keys_are_keys(pool):
    values = [bytes([i]) * 3 for i in range(len(HOSTILE))]
    assert pool.put(HOSTILE, values) == [STORED] * len(HOSTILE)
    targets = [bytearray(3) for _ in HOSTILE]
    assert pool.get(HOSTILE, targets) == [True] * len(HOSTILE)
    assert list(map(bytes, targets)) == values
    assert pool.exists([b"\xc3\xa9"], [3]) == [True], "a str is its UTF-8"


NOT_FLAT = torch.zeros(4, 4).T


@pytest.mark.parametrize(
    ("keys", "values", "message"),
    [
        (["k"], [b""], "values[0]: is empty"),
        (["k", "l"], [b"x", []], "values[1]: is empty"),
        (["k", "l"], [b"x"], "keys: 2 keys for 1 values"),
        ([7], [b"x"], "keys[0]: must be str or bytes, got int"),
        (["\ud800"], [b"x"], "keys[0]: is no text that UTF-8 can carry; give bytes"),
        (b"k", [b"x"], "keys: must be a list, got bytes"),
        (["k"], ["text"], "values[0]: must be bytes, a buffer"),
        (["k"], [None], "values[0]: must be bytes, a buffer"),
        (["k"], [NOT_FLAT], "values[0]: is not contiguous; call .contiguous() on it"),
        (["k"], [np.zeros((4, 4))[:, ::2]], "values[0]: is not contiguous; call numpy.ascontiguousarray"),
        (["k"], [memoryview(b"abcdef")[::2]], "values[0]: is not contiguous"),
        (["k"], [np.array([object()])], "values[0]: has elements that are Python objects"),
        (["k"], [torch.zeros(4, device="meta")], "values[0]: is on meta; values are moved from and to host memory"),
    ],
)
def test_wrong_arguments_are_named(pool, keys, values, message):
    for call in (pool.put, pool.async_put):
        with pytest.raises(EmsException) as caught:
            call(keys, values)
        assert caught.value.status_code() == EmsErrorCode.EMS_INVALID_ARGUMENT
        assert caught.value.message().startswith(message)


def test_targets_that_can_only_be_read_are_refused(pool):
    frozen = np.zeros(4, np.uint8)
    frozen.flags.writeable = False
    for target in (b"data", frozen, memoryview(b"data"), [bytearray(2), b"xx"]):
        with pytest.raises(EmsException, match=r"targets\[0\]: can only be read; a get writes to it"):
            pool.get(["k"], [target])
    assert pool.put(["k"], [frozen]) == [STORED], "a value may be read-only"


def test_targets_that_overlap_are_refused(pool):
    memory = bytearray(12)
    parts = [memoryview(memory)[start : start + 4] for start in (8, 0, 3)]
    for call in (pool.get, pool.async_get):
        with pytest.raises(EmsException, match=r"targets\[2\]: overlaps targets\[1\]; each value is written to memory"):
            call(["k", "l", "m"], parts)
    assert pool.put(["k", "l", "m"], parts) == [STORED] * 3, "values may be read from the same memory"


@pytest.mark.parametrize("length", [0, -1, True, "4", 4.0, 2**63, 10**400])
def test_lengths_are_numbers_of_bytes(pool, length):
    with pytest.raises(EmsException, match=r"lengths\[0\]: must be a number of bytes from 1 to"):
        pool.exists(["k"], [length])


def test_options_and_layouts_are_checked(agent, pool):
    with pytest.raises(EmsException, match="option: must be a CcKvOption"):
        pool.put(["k"], [b"x"], None)
    with pytest.raises(EmsException, match=r"option\.timeout: must be 0 to"):
        pool.exists(["k"], [1], CcKvOption(timeout=-1))
    for layout in ("x" * 4097, "\ud800"):
        with pytest.raises(EmsException, match=r"layout: must be a string of at most 4096 .* that UTF-8 can carry"):
            opened(agent, layout).__enter__()
    with pytest.raises(EmsException, match="config: must be an EmsConfig"):
        KvPool(None)


@pytest.mark.parametrize(
    "make",
    [
        lambda: bytearray(b"abcdefgh"),
        lambda: memoryview(bytearray(b"abcdefgh")),
        lambda: np.frombuffer(bytearray(b"abcdefgh"), np.float16),
        lambda: np.frombuffer(bytearray(b"abcdefgh"), np.uint16).reshape(2, 2),
        lambda: torch.frombuffer(bytearray(b"abcdefgh"), dtype=torch.bfloat16),
        lambda: torch.frombuffer(bytearray(b"abcdefgh"), dtype=torch.float32).reshape(1, 2),
        lambda: [bytearray(b"abc"), np.frombuffer(bytearray(b"defgh"), np.uint8)],
        lambda: KvPool.register(bytearray(b"--abcdefgh--"))[2:10],
    ],
)
def test_any_memory_holds_a_value(pool, make):
    value, target = make(), make()
    assert pool.put(["k"], [value]) == [STORED]
    for part in target if isinstance(target, list) else [target]:
        part = part.data if hasattr(part, "data") and isinstance(part.data, np.ndarray) else part
        memory = part.view(torch.uint8).numpy() if isinstance(part, torch.Tensor) else np.asarray(part)
        memory.reshape(-1).view(np.uint8)[:] = 0
    assert pool.get(["k"], [target]) == [True]
    assert pool.put(["k"], [target]) == [PRESENT]
    assert pool.put(["k"], [b"abcdefgh"]) == [PRESENT]


def test_memory_by_address(pool):
    memory = ctypes.create_string_buffer(b"x" * 64, 64)
    whole = KvPool.register(KvBufferWrapper(ctypes.addressof(memory), 64))
    assert len(whole) == 64
    assert pool.put(["a", "b"], [whole[:16], KvBufferWrapper(ctypes.addressof(memory), 16)]) == [STORED, STORED]
    assert pool.get(["a"], [KvBufferWrapper(ctypes.addressof(memory) + 16, 16)]) == [True]
    for cut in (3, slice(0, 8, 2)):
        with pytest.raises(EmsException, match="buffer: is cut by slices without a step"):
            whole[cut]
    with pytest.raises(EmsException, match="buffer: is empty"):
        KvPool.register(b"")


def test_a_value_larger_than_a_block_is_refused_and_the_others_are_kept(agent, pool, caplog):
    slab = agent.config.slab_bytes
    big = np.zeros(slab + 1, np.uint8)
    huge = np.zeros(agent.config.pool_bytes + 1, np.uint8)
    small = [b"1", b"2"]
    assert pool.put(["a", "big", "huge", "b"], [small[0], big, huge, small[1]]) == [
        STORED, KvStatus.TOO_LARGE, KvStatus.TOO_LARGE, STORED]  # fmt: skip
    assert f"a value of {len(huge)} bytes is not kept: the agent's --slab, its largest block, is {slab}" in caplog.text
    assert pool.get(["big"], [big]) == [False]
    chain = pool.put(["c", "big", "d"], [b"3", big, b"4"], is_chain=True)
    assert chain == [STORED, KvStatus.TOO_LARGE, KvStatus.TOO_LARGE]
    assert pool.exists(["d"], [1]) == [False], "nothing is of use behind what a chain lacks"


def test_a_batch_larger_than_staging_memory_and_pool():
    """64 MiB of values through 1 MiB of staging into 8 MiB of pool: the first are kept, the others get NO_ROOM."""
    with running_agent(staging_bytes=1 << 20) as agent, opened(agent) as pool:
        memory = KvPool.register(np.random.default_rng(1).integers(0, 255, 64 << 20, np.uint8))
        size = 200_000
        values = [memory[i * size : (i + 1) * size] for i in range(len(memory) // size)]
        keys = [f"k{i}" for i in range(len(values))]
        statuses = pool.put(keys, values, CcKvOption(timeout=60_000))
        count = statuses.index(KvStatus.NO_ROOM)
        assert count > 20
        assert statuses == [STORED] * count + [KvStatus.NO_ROOM] * (len(keys) - count)
        targets = [bytearray(size) for _ in keys[: count + 1]]
        assert pool.get(keys[: count + 1], targets) == [True] * count + [False]
        assert all(
            bytes(target) == value.data.tobytes() for target, value in zip(targets[:count], values, strict=False)
        )


def test_values_are_independent_unless_they_are_a_chain(agent, pool):
    """Their links decide the order of eviction: the end of a chain goes before its beginning."""
    keys = [f"c{i}" for i in range(100)]
    pool.put(keys, values_of(100, 100), is_chain=True)
    pool.put(["x", "y"], [b"1", b"2"])
    blocks = blocks_of(agent.node.pools()[0])
    assert [block.parent_key for block in blocks] == [b"", *(block.key for block in blocks[:99]), b"", b""]


def test_values_of_other_nodes_are_found_one_by_one():
    with two_agents() as (first, second), opened(first) as here, opened(second) as there:
        keys, values = [f"k{i}" for i in range(40)], values_of(40, 3000)
        assert all(status.is_success for status in here.put(keys[::2], values[::2]))
        pool = first.node.pools()[0]
        until(lambda: all(block.is_home or not block.is_rcache for block in blocks_of(pool)))
        expected = [i % 2 == 0 for i in range(40)]
        assert there.exists(keys, [3000] * 40) == expected
        local = there.exists(keys, [3000] * 40, CcKvOption(read_local_only=True))
        assert 0 < sum(local) < 20
        targets = [bytearray(3000) for _ in keys]
        assert there.get([*keys, *keys], [*targets, *map(bytearray, targets)]) == expected * 2
        assert all(bytes(targets[i]) == values[i] for i in range(0, 40, 2))


def test_futures_and_asyncio(pool):
    assert pool.async_put(["a"], [b"1"]).result() == [STORED]
    target, done = bytearray(1), threading.Event()
    future = pool.async_get(["a"], [target])
    future.add_done_callback(lambda _future: done.set())
    assert (future.result(), target) == ([True], b"1")
    assert done.wait(WAIT_S)

    async def ask() -> list[bool]:
        return await asyncio.wrap_future(pool.async_exists(["a", "b"], [1, 1]))

    assert asyncio.run(ask()) == [True, False]


def test_without_an_agent_calls_say_where_they_looked(tmp_path):
    with ems.open_pool(a_config(), socket=tmp_path / "nobody.sock") as pool:
        with pytest.raises(EmsException) as caught:
            pool.put(["a"], [b"1"], CcKvOption(timeout=100))
        assert caught.value.status_code() == EmsErrorCode.EMS_IO_ERROR
        assert not pool.is_healthy(0.1)


def test_an_agent_that_stands_still_is_not_healthy(tmp_path):
    """This holds even while a connection to it is open."""
    with AgentProcess(tmp_path / "ems.sock") as process, ems.open_pool(a_config(), socket=process.socket) as pool:
        assert pool.put(["a"], [b"1"]) == [STORED]
        with process.stopped():
            assert not pool.is_healthy(0.1)
            with pytest.raises(EmsException) as caught:
                pool.get(["a"], [bytearray(1)], CcKvOption(timeout=100))
            assert caught.value.status_code() == EmsErrorCode.EMS_IO_TIMEOUT
        until(pool.is_healthy)


@pytest.mark.parametrize("size", [100, 200_000])
def test_a_damaged_value_is_a_miss_and_is_forgotten(agent, pool, size):
    keys, values = ["a", "b", "c"], [b"1" * size, b"2" * size, b"3" * size]
    pool.put(keys, values)
    node = agent.node.pools()[0]
    damaged = blocks_of(node)[1]
    node.view(damaged.offset, damaged.length)[50] ^= 1
    targets = [bytearray(size) for _ in keys]
    assert pool.get(keys, targets) == [True, False, True]
    assert targets == [values[0], bytes(size), values[2]], "something of it was copied"
    until(lambda: node.counts["corrupt"] == 1)
    assert pool.put(["b"], [values[1]]) == [STORED]
    assert pool.get(["b"], [targets[1]]) == [True]


def test_an_agent_killed_in_mid_call(tmp_path):
    """Each call ends with results or EMS_IO_ERROR; all values found, before and after the restart, are right."""
    process = AgentProcess(tmp_path / "ems.sock", "--pool=64M", "--segment=8M", "--slab=1M")
    process.start()
    memory = KvPool.register(np.random.default_rng(1).integers(0, 255, 32 << 20, np.uint8))
    size = 256 << 10
    values = [memory[i * size : (i + 1) * size] for i in range(len(memory) // size)]
    keys = [f"k{i}" for i in range(len(values))]
    try:
        with ems.open_pool(a_config(), socket=tmp_path / "ems.sock") as pool:
            futures = [pool.async_put(keys, values, CcKvOption(timeout=5000)) for _ in range(3)]
            process.kill()
            for future in futures:
                with contextlib.suppress(EmsException):
                    assert set(future.result(30)) <= {STORED, PRESENT, KvStatus.UNANSWERED, KvStatus.NO_ROOM}
                    continue
                error = future.exception()
                assert isinstance(error, EmsException)
                assert error.status_code() == EmsErrorCode.EMS_IO_ERROR
            process.start()
            assert pool.exists(keys, [size] * len(keys)) == [False] * len(keys)
            assert set(pool.put(keys, values)) == {STORED}
            targets = [bytearray(size) for _ in keys]
            assert all(pool.get(keys, targets))
            assert all(bytes(target) == value.data.tobytes() for target, value in zip(targets, values, strict=True))
    finally:
        process.kill()


def test_a_forked_child_has_connections_of_its_own(pool):
    pool.put(["a"], [b"1"])
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        answer = b"0"
        with contextlib.suppress(BaseException):
            answer = b"1" if pool.exists(["a"], [1]) == [True] else b"0"
        os.write(writer, answer)
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 1) == b"1"
    assert pool.exists(["a"], [1]) == [True]
    os.close(reader)
    os.close(writer)
