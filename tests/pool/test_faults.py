"""Faults, with an oracle of true bytes: no wrong byte, no wait past the deadline, nothing left behind.

KVLOOM_POOL_KILLS is the number of processes killed in all (default 25; 200 is the full count).
"""

import os
import random
import secrets
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from ems import CcKvOption, EmsErrorCode, EmsException, context_caching
from ems.common.channel import Channel
from ems.native.calls import NativeCalls
from ems.native.line import NativeLine
from ems.wire import messages as m
from kvloom.net.devcerts import make_files
from kvloom.pool import door
from kvloom.pool.auth import new_credential
from kvloom.pool.config import Address
from kvloom.pool.storage.entries import NoRoom, Reservation
from tests.support.pool.agents import SECRET, blocks_of, new_kv, running_agent, session, shared_files, slots_of
from tests.support.pool.faults import AgentProcess, Oracle, run_until_killed
from tests.support.pool.node_proxy import NodeProxy
from tests.support.ports import free_port
from tests.support.waiting import WAIT_S, soon, until

KILLS = int(os.environ.get("KVLOOM_POOL_KILLS", "25"))
HASHES = list(range(1, 25))


@pytest.fixture(autouse=True)
def _nothing_is_left():
    before = shared_files()
    yield
    assert shared_files() <= before


@contextmanager
def waits_until(deadline_ms: int):
    """Checks that no wait inside ends after `deadline_ms`, counted from the start of the `with` block."""
    begin_s, found = time.monotonic(), []
    wait, begin, load, save = Channel._wait, NativeLine._by, NativeCalls.load, NativeCalls.save

    def noted(poll, deadline_s) -> None:
        found.append(deadline_s)
        wait(poll, deadline_s)

    def noted_by(line, deadline_s):
        found.append(deadline_s)
        return begin(line, deadline_s)

    def noted_call(call):
        def noted(calls, given, how, *memory):
            found.append(how.deadline_ns / 1e9)
            return call(calls, given, how, *memory)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_caching, "time", SimpleNamespace(monotonic=lambda: begin_s))
        patch.setattr(NativeCalls, "load", noted_call(load))
        patch.setattr(NativeCalls, "save", noted_call(save))
        patch.setattr(Channel, "_wait", staticmethod(noted))
        patch.setattr(NativeLine, "_by", noted_by)
        yield
    assert found
    assert max(found) <= begin_s + deadline_ms / 1000


def test_killed_clients_leave_whole_blocks_or_none(tmp_path):
    chance, oracle = random.Random(1), Oracle()
    with AgentProcess(tmp_path / "a.sock") as agent, session(agent.socket, oracle.kv) as cc:

        def write(tell) -> None:
            tell()
            mine = Oracle()
            with session(agent.socket, mine.kv) as child:
                for start in range(0, 400, 8):
                    tell()
                    mine.save(child, list(range(start, start + 8)))

        for _ in range(KILLS * 6 // 10):
            run_until_killed(write, chance.randrange(30))
            for start in range(0, 64, 8):
                oracle.load(cc, list(range(start, start + 8)))
        assert oracle.save(cc, [h + 10**6 for h in HASHES]) == len(HASHES)
        assert oracle.load(cc, [h + 10**6 for h in HASHES]) == len(HASHES)


def killing(killer, chance, calls):
    """Yields the calls in order; starts `killer` just before a random one of them."""
    fatal = chance.randrange(len(calls))
    for number, call in enumerate(calls):
        if number == fatal:
            killer.start()
        yield call


def test_killed_agents_cost_an_error_and_then_misses(tmp_path):
    chance, oracle, codes = random.Random(2), Oracle(), set()
    with AgentProcess(tmp_path / "a.sock") as agent, session(agent.socket, oracle.kv) as cc:
        for i in range(KILLS * 2 // 10):
            killer = threading.Thread(target=agent.process.kill)
            hashes = [h + 100 * i for h in HASHES]
            for call in killing(killer, chance, [oracle.save, oracle.load] * 4):
                try:
                    call(cc, hashes)
                except EmsException as error:
                    codes.add(error.status_code())
                    break
            killer.join()
            agent.kill()
            agent.start()
            assert codes <= {EmsErrorCode.EMS_IO_ERROR}
            assert oracle.load(cc, hashes) == 0
            assert oracle.save(cc, hashes) == len(hashes)


@pytest.fixture(params=["plain", "tls"])
def pair(tmp_path, request):
    """Two nodes in processes of their own, on fixed ports, with a session on each."""
    tls = []
    if request.param == "tls":
        make_files(tmp_path)
        tls = [f"--tls-dir={tmp_path}"]
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    with ExitStack() as stack:
        ports = [free_port() for _ in range(2)]
        agents, sessions = [], []
        for i in range(2):
            others = f"--peer=n{1 - i}=127.0.0.1:{ports[1 - i]}"
            own = (f"--secret-file={secret}", f"--node-id=n{i}", f"--listen=127.0.0.1:{ports[i]}", others)
            agents.append(stack.enter_context(AgentProcess(tmp_path / f"{i}.sock", *own, *tls)))
        for agent in agents:
            oracle = Oracle()
            sessions.append((oracle, stack.enter_context(session(agent.socket, oracle.kv))))
        yield agents, sessions


def test_killed_peers_cost_blocks_and_no_error(pair):
    chance = random.Random(3)
    (_here, there), ((oracle, cc), (other, other_cc)) = pair
    for i in range(KILLS * 2 // 10):
        hashes = [h + 100 * i for h in HASHES]
        with suppress(EmsException):
            other.save(other_cc, hashes, write_rcache=False)
        killer = threading.Thread(target=there.process.kill)
        for call in killing(killer, chance, [oracle.load, oracle.save] * 3):
            call(cc, hashes if call == oracle.load else [h + 50 for h in hashes], timeout=60_000)
        killer.join()
        there.kill()
        there.start()
    assert oracle.save(cc, [10**7 + h for h in HASHES]) == len(HASHES)


def test_a_stopped_agent_costs_the_deadline(tmp_path):
    oracle = Oracle()
    with AgentProcess(tmp_path / "a.sock") as agent, session(agent.socket, oracle.kv) as cc:
        assert oracle.save(cc, HASHES) == len(HASHES)
        with agent.stopped():
            for call in (oracle.save, oracle.load):
                with waits_until(300), pytest.raises(EmsException) as caught:
                    call(cc, HASHES, timeout=300)
                assert caught.value.status_code() == EmsErrorCode.EMS_IO_TIMEOUT
            with waits_until(300):
                assert cc.exists(HASHES, CcKvOption(timeout=300)) == 0
        assert oracle.load(cc, HASHES) == len(HASHES)


def test_a_stopped_peer_costs_the_deadline_and_then_nothing(pair):
    (_here, there), ((oracle, cc), _other) = pair
    assert oracle.save(cc, HASHES, write_rcache=False) == len(HASHES)
    with there.stopped():
        for _ in range(3):
            assert oracle.load(cc, HASHES, timeout=2000) < len(HASHES)  # a missed deadline would raise
        with ThreadPoolExecutor(1) as pool:  # the breaker is open, so the call does not wait for its deadline
            assert pool.submit(oracle.load, cc, HASHES, timeout=60_000).result(WAIT_S) < len(HASHES)


@pytest.mark.parametrize("position", [0, 1, 8191, 16383])
def test_a_flipped_bit_in_the_pool_is_a_miss(position):
    oracle = Oracle()
    with running_agent() as agent, session(agent.config.socket, oracle.kv) as cc:
        assert oracle.save(cc, HASHES) == len(HASHES)
        pool = agent.node.pool("default")
        entries = sorted(blocks_of(pool), key=lambda entry: entry.offset)
        pool.view(entries[5].offset, entries[5].length)[position] ^= 4
        assert oracle.load(cc, HASHES) == 5
        assert oracle.load(cc, HASHES) == 5
        assert pool.counts["corrupt"] == 1
        assert pool.counts["miss_corrupt"] == len(HASHES) - 5
        assert oracle.save(cc, HASHES) == len(HASHES)
        assert oracle.load(cc, HASHES) == len(HASHES)
        pool.check()


def test_flipped_bits_between_nodes_are_misses(pair_in_process):
    (a, b), proxy = pair_in_process
    one, two = Oracle(), Oracle()
    with session(a.config.socket, one.kv) as cc, session(b.config.socket, two.kv) as other:
        for i in range(10):
            hashes = [h + 100 * i for h in HASHES]
            assert two.save(other, hashes) == len(hashes)
            proxy.is_flipping = True
            one.load(cc, hashes, timeout=1000)
            proxy.is_flipping = False
            a.peers._links["b"].breaker.succeed()
            one.load(cc, hashes)
        counts = a.node.pool("default").counts
        assert counts["corrupt_on_wire"] + counts["miss_peer_down"] + counts["miss_timeout"] > 0
        a.node.pool("default").check()


@pytest.fixture
def pair_in_process():
    """Nodes a and b in this process; a reaches b through a proxy that can flip bits."""
    cluster = {"listen": ("127.0.0.1", 0), "secret": SECRET}
    nowhere = (Address("x", "127.0.0.1", 1),)
    with (
        running_agent(node_id="a", peers=nowhere, **cluster) as a,
        running_agent(node_id="b", peers=nowhere, **cluster) as b,
    ):
        proxy = NodeProxy(b.peer_port)
        a.peers.set_members([Address("b", "127.0.0.1", proxy.port)])
        b.peers.set_members([Address("a", "127.0.0.1", a.peer_port)])
        yield (a, b), proxy
        proxy.close()


def test_garbage_ends_its_connection_and_nothing_else(tmp_path):
    chance, oracle = random.Random(5), Oracle()
    with running_agent() as agent, session(agent.config.socket, oracle.kv) as cc:
        assert oracle.save(cc, HASHES) == len(HASHES)
        for i in range(50):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(str(agent.config.socket))
                sock.settimeout(WAIT_S)
                channel = Channel(sock)
                limit = soon()
                if i % 2:
                    channel.send(m.Hello("", bytes(32)), limit)
                    channel.receive(limit)
                with suppress(OSError):
                    sock.sendall(chance.randbytes(chance.randrange(28, 4000)))
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(4096):
                        pass
        assert oracle.load(cc, HASHES) == len(HASHES)


@pytest.mark.parametrize("is_direct", [False, True])
def test_a_tenant_over_its_rate_saves_less_and_gets_no_error(is_direct):
    oracle = Oracle()
    with running_agent(put_rate=1, is_direct=is_direct) as agent, session(agent.config.socket, oracle.kv) as cc:
        assert oracle.save(cc, HASHES[:8]) == 8, "one message may overdraw"
        assert oracle.save(cc, [h + 1000 for h in HASHES[:8]]) == 0
        assert oracle.load(cc, HASHES[:8]) == 8


def test_a_block_that_found_no_room_is_a_miss_by_quota():
    oracle = Oracle()
    with running_agent(pool_bytes=1 << 20) as agent, session(agent.config.socket, oracle.kv) as cc:
        pool = agent.node.pool("default")
        while isinstance(begun := pool.begin(secrets.token_bytes(32), 4096), Reservation):
            pass  # blocks that are being written cannot be evicted
        assert begun == NoRoom(m.Status.NO_ROOM)
        assert oracle.save(cc, HASHES) == 0
        assert oracle.load(cc, HASHES) == 0
        assert pool.counts["miss_quota"] == len(HASHES)


KEY = "k" * 40


@pytest.fixture
def guarded(tmp_path):
    """A node with the tenants a and b."""
    with running_agent(is_open=False, secret=SECRET) as agent:
        agent.node.keyring.replace([new_credential("a", "a", KEY), new_credential("b", "b", KEY[::-1] + "b")])
        yield agent


@pytest.mark.parametrize(("access_id", "access_key"), [("a", "x" * 40), ("c", KEY), ("", ""), ("b", KEY)])
def test_wrong_keys_open_nothing(guarded, access_id, access_key):
    with session(guarded.config.socket, new_kv(), access_id=access_id, access_key=access_key) as cc:
        with pytest.raises(EmsException) as caught:
            cc.load(slots_of(0), [1], [4])
        assert caught.value.status_code() == EmsErrorCode.EMS_IO_ERROR
        assert "wrong" in caught.value.message()


def test_a_revoked_key_ends_its_sessions(guarded):
    oracle = Oracle()
    with session(guarded.config.socket, oracle.kv, access_id="a", access_key=KEY) as cc:
        assert oracle.save(cc, HASHES) == len(HASHES)
        assert oracle.load(cc, HASHES) == len(HASHES), "its memory is known: from now on C++ answers alone"
        guarded.node.keyring.replace([])
        for _ in range(2):
            with pytest.raises(EmsException):
                oracle.load(cc, HASHES)


def test_tenants_do_not_see_each_other_and_keep_their_guarantee(guarded):
    one, two = Oracle(), Oracle()
    with (
        session(guarded.config.socket, one.kv, access_id="a", access_key=KEY) as a,
        session(guarded.config.socket, two.kv, access_id="b", access_key=KEY[::-1] + "b") as b,
    ):
        assert one.save(a, HASHES) == len(HASHES)
        assert two.load(b, HASHES) == 0
        for start in range(0, 1600, 16):
            two.save(b, list(range(start, start + 16)))
        assert one.load(a, HASHES) == len(HASHES), "another tenant's storm evicts nothing of ours"


def test_an_eviction_storm_gives_true_bytes_or_misses():
    with running_agent(pool_bytes=1 << 20) as agent:

        def churn(seed: int) -> None:
            chance, oracle = random.Random(seed), Oracle()
            with session(agent.config.socket, oracle.kv) as cc:
                for _ in range(40):
                    start = chance.randrange(200)
                    hashes = list(range(start, start + chance.randrange(1, 24)))
                    (oracle.save if chance.random() < 0.5 else oracle.load)(cc, hashes)

        _run_all([lambda i=i: churn(i) for i in range(4)])
        agent.node.pool("default").check()
        assert agent.node.pool("default").counts["evicted"] > 0


def test_eight_writers_of_one_key_store_it_once():
    with running_agent() as agent:
        barrier = threading.Barrier(8)

        def write() -> None:
            oracle = Oracle()
            with session(agent.config.socket, oracle.kv) as cc:
                barrier.wait()
                assert oracle.save(cc, HASHES) == len(HASHES)
                assert oracle.load(cc, HASHES) == len(HASHES)

        _run_all([write] * 8)
        counts = agent.node.pool("default").counts
        assert counts["save_stored"] == len(HASHES)
        assert counts["save_duplicate"] == 7 * len(HASHES)
        agent.node.pool("default").check()


def _run_all(tasks) -> None:
    with ThreadPoolExecutor(len(tasks)) as threads:
        for task in [threads.submit(task) for task in tasks]:
            task.result()


def test_sealed_segments_refuse_writers(agent, cc):
    cc.save(slots_of(0), [1], [4])
    fd = agent.node.pool("default").segment_fd(0)
    for attempt in (lambda: os.pwrite(fd, b"x", 0), lambda: os.ftruncate(fd, 0)):
        with pytest.raises(PermissionError):
            attempt()
    assert not list(Path("/dev/shm").glob("ems-*"))


def test_an_agent_whose_socket_was_removed_is_reached_again(monkeypatch, tmp_path):
    monkeypatch.setattr(door, "_LOOK_S", 0.01)
    with running_agent(socket=tmp_path / "ems.sock") as agent, session(agent.config.socket, new_kv()) as first:
        assert first.save(slots_of(0), [1], [4]).success == 1
        agent.config.socket.unlink()
        until(agent.config.socket.exists)
        with session(agent.config.socket, new_kv()) as later:
            assert later.exists([1]) == 1
        assert first.exists([1]) == 1, "who was connected still is"
    assert not agent.config.socket.exists()
