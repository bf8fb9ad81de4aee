"""An agent with a distributed store behind it: loads give true bytes or misses, and late calls do no harm."""

import contextlib
import importlib
import itertools
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from ems import CcKvOption
from ems.wire.messages import split_keys
from kvloom.pool.agent import Agent
from kvloom.pool.bench.redis import find_server, private_server
from kvloom.pool.stores.engine import EngineError, EngineFull, open_engine
from kvloom.pool.stores.tier import EngineTier
from tests.support.pool.agents import new_kv, running_agent, session, slots_of, tokens_of, zero
from tests.support.pool.stores import HASHES, OFFSETS, SLOTS, check_round_trip, emptied, saved_and_forgotten
from tests.support.waiting import until


def names_of(cc, hashes: list[int]) -> list[str]:
    """The names in the store of blocks that a session saves under these hashes."""
    keys = cc._planning_cache(cc._key_space[0]).names(hashes)
    return [f"ems:default:2:{key.hex()}" for key in split_keys(keys)]


class FakeEngine:
    """A store in a dictionary. While `gate` is closed its calls wait; when `is_failing` they raise EngineError, and
    puts EngineFull when `is_full`.
    """

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.is_failing = self.is_full = False
        self.num_calls = self.num_stored = 0

    def _enter(self) -> None:
        self.num_calls += 1
        self.gate.wait(60)
        if self.is_failing:
            raise EngineError("down")

    def put(self, names, values) -> None:
        self._enter()
        if self.is_full:
            raise EngineFull("no memory")
        self.num_stored += len(names)
        self.values |= dict(zip(names, values, strict=True))

    def get(self, names):
        self._enter()
        return [memoryview(self.values[name]) if name in self.values else None for name in names]

    def has(self, names):
        self._enter()
        return [name in self.values for name in names]

    def close(self) -> None:
        self.gate.set()


@contextlib.contextmanager
def agent_with(engine) -> Iterator[Agent]:
    with running_agent(rcache_share=1.0) as agent:
        agent.engine = agent.node.others = EngineTier(engine)
        yield agent


def test_what_left_the_node_comes_back_from_the_store():
    with agent_with(FakeEngine()) as agent:
        check_round_trip(agent)


def test_blocks_that_come_do_not_push_each_other_out_of_a_full_pool():
    with running_agent(rcache_share=1.0, pool_bytes=1 << 20) as agent, session(agent.config.socket, new_kv()) as cc:
        agent.engine = agent.node.others = EngineTier(FakeEngine())
        pool = agent.node.pool("default")
        batches = [list(range(start, start + 48)) for start in range(0, 960, 48)]
        for i, hashes in enumerate(batches):
            cc.save(slots_of(*range(48)), hashes, [4] * 48)
            until(lambda i=i: pool.counts["push_done"] == 48 * (i + 1))
        for hashes in batches * 2:
            assert cc.load(slots_of(*range(48)), hashes, [4] * 48).success == 48
        pool.check()


def test_a_batch_larger_than_the_nodes_pool_goes_to_the_store_whole(either_kind):
    kv, engine = new_kv(num_blocks=400), FakeEngine()
    with running_agent(rcache_share=1.0, pool_bytes=1 << 20) as agent, session(agent.config.socket, kv) as cc:
        agent.engine = agent.node.others = EngineTier(engine)
        option = CcKvOption(timeout=60_000)
        assert cc.save(slots_of(*range(400)), list(range(400)), [4] * 400, option).success == 400
        until(lambda: len(engine.values) == 400)
        agent.node.pool("default").check()


def test_what_the_store_has_lost_is_stored_again_when_it_is_saved_again():
    engine = FakeEngine()
    with agent_with(engine) as agent, session(agent.config.socket, new_kv()) as cc:
        cc.save(SLOTS, HASHES, OFFSETS)
        until(lambda: len(engine.values) == len(HASHES))
        until(lambda: agent.node.pool("default").counts["push_done"] == len(HASHES))
        lost = list(engine.values)[::2]
        for name in lost:
            del engine.values[name]
        assert cc.save(SLOTS, HASHES, OFFSETS).local == 0
        until(lambda: len(engine.values) == len(HASHES))
        assert engine.num_stored == len(HASHES) + len(lost), "what it had was not stored again"


def test_without_write_rcache_blocks_go_to_the_store_only():
    engine = FakeEngine()
    with agent_with(engine) as agent, session(agent.config.socket, new_kv()) as cc:
        assert cc.save(SLOTS, HASHES, OFFSETS, CcKvOption(write_rcache=False)).success == len(HASHES)
        assert agent.node.pool("default").usage()["blocks"] == 0
        assert len(engine.values) == len(HASHES)


def test_a_late_get_costs_its_deadline_and_changes_nothing_when_it_returns():
    engine, kv = FakeEngine(), new_kv()
    with agent_with(engine) as agent, session(agent.config.socket, kv) as cc:
        saved_and_forgotten(agent, cc)
        zero(kv)
        engine.gate.clear()
        assert cc.load(SLOTS, HASHES, OFFSETS, CcKvOption(timeout=1000)).success == 0
        assert agent.node.pool("default").counts["miss_timeout"] == len(HASHES)
        engine.gate.set()
        until(lambda: agent.engine._num_busy == 0)
        assert agent.node.pool("default").usage()["blocks"] == 0, "the late result is dropped"
        assert not tokens_of(kv, SLOTS).any()


def test_a_late_put_keeps_its_blocks_pinned_until_it_returns():
    engine = FakeEngine()
    with agent_with(engine) as agent, session(agent.config.socket, new_kv()) as cc:
        pool = agent.node.pool("default")
        engine.gate.clear()
        assert cc.save(slots_of(0), [1], [4]).success == 1
        until(lambda: engine.num_calls == 1)
        assert pool.evict(1 << 30) == 0, "the store still reads from it"
        engine.gate.set()
        until(lambda: pool.counts["push_done"] == 1)
        assert pool.evict(1 << 30) > 0
        pool.check()


def test_calls_that_never_return_do_not_pile_up():
    engine, now = FakeEngine(), [0.0]
    tier = EngineTier(engine, lambda: now[0])
    engine.gate.clear()
    for _ in range(20):
        now[0] += 100  # longer than any pause of the breaker
        assert tier.has("t", [bytes(32)], now[0]) == [False]
    until(lambda: engine.num_calls == 4)
    assert tier._num_busy == 4
    engine.gate.set()
    until(lambda: tier._num_busy == 0)
    now[0] += 100
    assert tier.has("t", [bytes(32)], now[0] + 5) == [False]
    assert tier.status() == {"engine": True}
    tier.close()


def test_a_store_that_is_down_is_left_alone_and_blocks_stay_here():
    engine = FakeEngine()
    engine.is_failing = True
    with agent_with(engine) as agent, session(agent.config.socket, new_kv()) as cc:
        for block in range(8):
            cc.load(slots_of(block), [block], [4])
        assert engine.num_calls == 2, "the breaker opens at the second failure"
        assert cc.save(SLOTS, HASHES, OFFSETS).success == len(HASHES)
        assert cc.load(SLOTS, HASHES, OFFSETS).success == len(HASHES)
        assert agent.node.pool("default").usage()["rcache_bytes"] == 0
        assert agent.stats().peers == {"engine": False}


def test_a_full_store_gives_what_it_has_and_saves_say_that_blocks_stay_here(caplog):
    engine = FakeEngine()
    with agent_with(engine) as agent, session(agent.config.socket, new_kv()) as cc:
        saved_and_forgotten(agent, cc)
        engine.is_full = True
        pool = agent.node.pool("default")
        starts = itertools.count(1000, 1000)
        until(lambda: cc.save(SLOTS, [next(starts) * 10 + h for h in HASHES], OFFSETS).local == len(HASHES))
        assert pool.counts["push_failed"] > 0
        assert cc.load(SLOTS, HASHES, OFFSETS).success == len(HASHES)
        assert [r.message for r in caplog.records if "the store" in r.message] == [
            "the store takes no blocks, which stay on this node: no memory"
        ]


def test_callers_with_little_time_keep_nobody_else_from_the_store():
    engine = FakeEngine()
    engine.values = {f"ems:t:2:{'00' * 32}": b"value"}
    tier = EngineTier(engine, lambda: 0.0)
    engine.gate.clear()
    for _ in range(3):
        assert tier.has("t", [bytes(32)], 0.01) == [False]
    engine.gate.set()
    until(lambda: tier._num_busy == 0)
    assert tier.has("t", [bytes(32)], 5.0) == [True]
    tier.close()


@pytest.mark.parametrize("damage", [lambda v: v[:-1] + b"?", lambda v: v[:3], lambda v: b""])
def test_a_damaged_value_is_a_miss(damage):
    engine, kv = FakeEngine(), new_kv()
    with agent_with(engine) as agent, session(agent.config.socket, kv) as cc:
        saved_and_forgotten(agent, cc)
        engine.values = {name: damage(value) for name, value in engine.values.items()}
        zero(kv)
        assert cc.load(SLOTS, HASHES, OFFSETS).success == 0
        assert agent.node.pool("default").counts["corrupt_on_wire"] > 0
        assert not tokens_of(kv, SLOTS).any()


@pytest.mark.parametrize("far", [1, 15])
def test_good_values_under_each_others_names_are_misses(far):
    engine, kv = FakeEngine(), new_kv()
    with agent_with(engine) as agent, session(agent.config.socket, kv) as cc:
        saved_and_forgotten(agent, cc)
        names = names_of(cc, HASHES)
        values = engine.values
        values[names[0]], values[names[far]] = values[names[far]], values[names[0]]
        zero(kv)
        assert cc.load(SLOTS, HASHES, OFFSETS).success == 0
        assert agent.node.pool("default").counts["corrupt_on_wire"] > 0
        assert not tokens_of(kv, SLOTS).any()


@pytest.mark.parametrize("other", [{"model_id": "another"}, {"llm_engine": "another"}])
def test_a_good_value_of_another_model_is_a_miss(other):
    engine, kv, theirs = FakeEngine(), new_kv(), new_kv(seed=7)
    with agent_with(engine) as agent, session(agent.config.socket, kv) as cc:
        with session(agent.config.socket, theirs, **other) as another:
            saved_and_forgotten(agent, another)
            foreign = [engine.values[name] for name in names_of(another, HASHES)]
        assert cc.exists(HASHES) == 0
        engine.values = dict(zip(names_of(cc, HASHES), foreign, strict=True))
        zero(kv)
        assert cc.load(SLOTS, HASHES, OFFSETS).success == 0
        assert not tokens_of(kv, SLOTS).any()


def test_values_of_an_earlier_version_are_misses():
    engine, kv = FakeEngine(), new_kv()
    with agent_with(engine) as agent, session(agent.config.socket, kv) as cc:
        saved_and_forgotten(agent, cc)
        values = {name: xxhash.xxh3_128_digest(value[16:]) + value[16:] for name, value in engine.values.items()}
        engine.values = {name.replace(":2:", ":"): value for name, value in values.items()}
        assert cc.load(SLOTS, HASHES, OFFSETS).success == 0
        engine.values = values
        assert cc.load(SLOTS, HASHES, OFFSETS).success == 0, "nor under the names of today"


@pytest.fixture
def server(tmp_path) -> Iterator[Path]:
    """The socket of a real Valkey or Redis server."""
    command = find_server()
    if command is None:
        pytest.skip("needs valkey-server or redis-server")
    with private_server(command, 64 << 20) as path:
        yield path


def test_a_real_server_keeps_blocks_for_the_node(server):
    with running_agent(rcache_share=1.0, engine=f"unix://{server}") as agent:
        check_round_trip(agent)
        assert agent.stats().peers == {"engine": True}


def test_two_nodes_on_one_server_take_no_values_that_changed_places(server):
    engine, kv, truth = f"unix://{server}", new_kv(), new_kv()
    with running_agent(rcache_share=1.0, engine=engine) as one, running_agent(rcache_share=1.0, engine=engine) as other:
        with session(one.config.socket, truth) as cc:
            saved_and_forgotten(one, cc)
            first, second = names_of(cc, [HASHES[3], HASHES[7]])
        client = valkey_client(server)
        client.mset({first: client.get(second), second: client.get(first)})
        zero(kv)
        with session(other.config.socket, kv) as cc:
            assert cc.load(SLOTS, HASHES, OFFSETS).success == 3
        assert (tokens_of(kv, SLOTS[:12]) == tokens_of(truth, SLOTS[:12])).all()
        assert not tokens_of(kv, SLOTS[12:]).any()


def test_a_stopped_server_costs_the_deadline_and_no_more(server):
    with running_agent(rcache_share=1.0, engine=f"unix://{server}") as agent:
        kv = new_kv()
        with session(agent.config.socket, kv) as cc:
            saved_and_forgotten(agent, cc)
            pid = _pid_of_server(server)
            os.kill(pid, signal.SIGSTOP)
            try:
                for _ in range(3):
                    assert cc.load(SLOTS, HASHES, OFFSETS, CcKvOption(timeout=1000)).success == 0
            finally:
                os.kill(pid, signal.SIGCONT)


def test_a_server_without_memory_gives_what_it_has(server):
    socket = f"unix://{server}"
    with running_agent(rcache_share=1.0, engine=socket) as agent, session(agent.config.socket, new_kv()) as cc:
        saved_and_forgotten(agent, cc)
        client = valkey_client(server)
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", "1")
        cc.save(slots_of(*range(64)), list(range(64)), [4] * 64)
        until(lambda: agent.node.pool("default").counts["push_failed"] == 64)
        assert cc.load(SLOTS, HASHES, OFFSETS).success == len(HASHES)


def test_another_type_under_a_blocks_name_is_a_miss_of_that_block(server):
    socket = f"unix://{server}"
    with running_agent(rcache_share=1.0, engine=socket) as agent, session(agent.config.socket, new_kv()) as cc:
        saved_and_forgotten(agent, cc)
        client = valkey_client(server)
        cc.load(SLOTS, HASHES, OFFSETS)
        keys = agent.node.pool("default").block_keys()
        name = f"ems:default:2:{keys[5].hex()}"
        client.delete(name)
        client.lpush(name, "something else")
        emptied(agent.node.pool("default"))
        assert cc.load(SLOTS, HASHES, OFFSETS).success == 5


def valkey_client(path: Path):
    return importlib.import_module("valkey").Valkey(unix_socket_path=str(path))


def _pid_of_server(path: Path) -> int:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(path))
        return struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]


def test_a_cluster_client_says_when_there_is_no_cluster(server):
    with pytest.raises(EngineError, match="engine valkey"):
        open_engine("valkey+cluster://127.0.0.1:1", "")


def test_a_store_that_is_not_there_ends_the_start(tmp_path, capfd):
    arguments = [f"--socket={tmp_path / 'a.sock'}", "--pool=16M", "--engine=valkey://127.0.0.1:1"]
    done = subprocess.run([sys.executable, "-m", "kvloom", "pool", "agent", *arguments], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("kvloom pool agent: engine valkey://127.0.0.1:1: ")
    assert not (tmp_path / "a.sock").exists()
