"""An agent's limits: sessions, staging memory, descriptors. Callers beyond them wait, are counted and told why."""

import errno
import logging
import socket
import threading
import time
from contextlib import ExitStack, closing

import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from ems import CcKvOption, CcResult, EmsErrorCode, EmsException
from ems.transport import Link, SegmentMaps
from ems.wire import messages as m
from kvloom.pool.auth import RefusedLogins
from kvloom.pool.cli import app
from kvloom.pool.control.service import build_app
from kvloom.pool.control.state import ControlState
from kvloom.pool.metrics import render
from kvloom.pool.staging import Staging
from kvloom.pool.storage.counts import Counts
from tests.support.pool.agents import SECRET, has_pushed, new_kv, running_agent, session, slots_of, two_agents
from tests.support.waiting import WAIT_S, soon, until


def link_to(agent, wait_s: float = WAIT_S) -> Link:
    return Link(agent.config.socket, "", "", SegmentMaps(), time.monotonic() + wait_s)


def gauge(agent, name: str) -> float:
    rows = render([agent.stats()]).decode().splitlines()
    return next(float(row.rpartition(" ")[2]) for row in rows if row.startswith(f"ems_{name}{{"))


def test_who_finds_all_sessions_taken_waits_for_one_to_end():
    with running_agent(max_sessions=2) as agent:
        links = [link_to(agent) for _ in range(2)]
        assert (gauge(agent, "sessions"), gauge(agent, "sessions_limit")) == (2, 2)
        with pytest.raises(TimeoutError):
            link_to(agent, 0.3)
        came: list[Link] = []
        waiting = threading.Thread(target=lambda: came.append(link_to(agent)))
        waiting.start()
        until(lambda: agent.node and gauge(agent, "sessions_waited_total") >= 1)
        links.pop().close()
        waiting.join()
        assert isinstance(came[0].call(m.Ping(), soon()), m.Done)
        for link in links + came:
            link.close()
        until(lambda: gauge(agent, "sessions") == 0)


def test_nodes_that_know_the_secret_take_no_place_of_others():
    """A node has connections for loads and one for pushes; with many nodes the last ones found no place, for ever."""
    kv, hashes = new_kv(), list(range(40))
    with two_agents(max_sessions=1, peer_connections=3) as (a, b):
        for saving, loading in ((a, b), (b, a)):
            with session(saving.config.socket, kv) as cc:
                assert cc.save(slots_of(*range(40)), hashes, [4] * 40) == CcResult(40, 40)
                until(lambda: has_pushed(a, b))
            with session(loading.config.socket, kv) as cc:
                assert cc.load(slots_of(*range(40)), hashes, [4] * 40) == CcResult(40, 40)
            hashes = [each + 1000 for each in hashes]
        assert not a.node.pools()[0].counts["push_failed"] + b.node.pools()[0].counts["push_failed"]


def test_callers_who_may_be_nodes_have_as_many_places_as_engines():
    with two_agents(max_sessions=2) as (a, b), ExitStack() as stack:
        assert not any(b.peers.has("default", [bytes([i]) * 32 for i in range(16)], soon()))
        assert a._sessions, "it was asked"
        b.peers.close()
        until(lambda: not a._sessions)
        for _ in range(2):
            stack.enter_context(socket.create_connection(("127.0.0.1", a.peer_port)))
        until(lambda: gauge(a, "sessions_waited_total") >= 1)
        assert gauge(a, "sessions") == 0


def test_a_node_that_vanished_does_not_keep_its_connections():
    """Its machine has lost power, or the network its packets: the system probes the connection, and ends it."""
    with two_agents() as (a, b):
        assert not any(b.peers.has("default", [bytes([i]) * 32 for i in range(16)], soon()))
        (sock,) = (channel.sock for channel in a._sessions)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle_s = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
        pause_s = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
        assert idle_s + pause_s * sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) <= 120


def test_a_burst_of_connections_is_served_within_its_deadlines():
    with running_agent(max_sessions=8) as agent:
        problems: list[Exception] = []

        def work(number: int) -> None:
            try:
                with session(agent.config.socket, new_kv()) as cc:
                    assert cc.save(slots_of(0), [number], [4], CcKvOption(timeout=60_000)).success == 1
            except Exception as error:
                problems.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(150)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert problems == []


def test_a_full_queue_of_callers_is_waited_for(tmp_path):
    path = tmp_path / "s"
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(path))
        listener.listen(0)
        stack.enter_context(socket.socket(socket.AF_UNIX)).connect(str(path))
        with pytest.raises(TimeoutError):
            Link(path, "", "", SegmentMaps(), time.monotonic() + 0.2)


def test_without_descriptors_callers_wait_and_the_agent_does_not_spin(monkeypatch):
    with running_agent() as agent:
        listener = agent._door._listeners[socket.AF_UNIX]
        accepts: list[int] = []

        class Short:
            def __getattr__(self, name: str):
                return getattr(listener, name)

            def accept(self):
                accepts.append(1)
                if len(accepts) < 4:
                    raise OSError(errno.EMFILE, "Too many open files")
                return listener.accept()

        taken = agent._door._accept
        monkeypatch.setattr(agent._door, "_accept", lambda _listener: taken(Short()))
        link = link_to(agent)
        link.close()
        assert len(accepts) >= 4
        assert gauge(agent, "accept_failures_total") == 3


def test_staging_memory_has_a_limit_for_all_sessions_together():
    with running_agent(staging_bytes=1 << 20) as agent, ExitStack() as stack:
        links = []
        for _ in range(8):
            links.append(link_to(agent))
            stack.callback(links[-1].close)
        sizes = [len(link.arena(1 << 20, 128 << 10, soon())) for link in links[:7]]
        assert min(sizes) >= 128 << 10
        assert sum(sizes) == gauge(agent, "staging_bytes") <= 1 << 20
        with pytest.raises(EmsException, match="--staging") as caught:
            links[7].arena(512 << 10, 512 << 10, time.monotonic() + 2)
        assert caught.value.status_code() == EmsErrorCode.EMS_IO_TIMEOUT
        assert agent.node.pool("default").counts["denied_staging"] == 1
        with pytest.raises(EmsException, match="a staging area is"):
            links[7].arena(2 << 20, 2 << 20, soon())
        for link in links[:7]:
            link.close()
        assert len(links[7].arena(512 << 10, 512 << 10, soon())) == 512 << 10


def test_a_save_goes_through_a_small_staging_area():
    kv = new_kv(num_blocks=64, dim=256)
    with running_agent(staging_bytes=256 << 10) as agent, session(agent.config.socket, kv) as cc:
        assert cc.save(slots_of(*range(64)), list(range(64)), [4] * 64).success == 64
        assert cc.load(slots_of(*range(64)), list(range(64)), [4] * 64).success == 64


def test_a_save_larger_than_the_pool_keeps_its_beginning_and_says_so(caplog):
    kv, count = new_kv(num_blocks=300), 300
    arguments = (slots_of(*range(count)), list(range(count)), [4] * count)
    with running_agent(pool_bytes=1 << 20) as agent, session(agent.config.socket, kv) as cc:
        for _ in range(2):
            assert cc.save(*arguments).success == (1 << 20) // 4096
        assert cc.exists(list(range(count))) == cc.load(*arguments).success == (1 << 20) // 4096
        assert agent.node.pool("default").counts["refused_pinned"] > 0
        assert agent.node.pool("default").counts["evicted"] == 0
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "a save found room for its first blocks only"
    ]


def test_a_hundred_sessions_find_staging_memory_beside_each_other():
    staging = Staging(64 << 20)
    sizes = [staging.take(16 << 20, 64 << 10, 0.0) for _ in range(100)]
    assert sizes[0] == 2 << 20
    assert min(sizes) > 64 << 10
    assert sum(sizes) == staging.used_bytes <= 64 << 20


def test_a_session_with_large_blocks_has_staging_memory_for_four_while_much_is_left():
    staging = Staging(64 << 20)
    assert staging.take(16 << 20, 1 << 20, 0.0) == 4 << 20
    assert 3 << 20 < staging.take(16 << 20, 1 << 20, 0.0) < 4 << 20
    assert staging.take(32 << 20, 32 << 20, 0.0) == 32 << 20
    assert 1 << 20 < staging.take(16 << 20, 1 << 20, 0.0) < 2 << 20


def test_staging_is_handed_on_when_it_is_given_back():
    staging = Staging(100)
    assert staging.take(1000, 25, 0.0) == 25
    assert staging.take(80, 80, 0.0) == 0
    assert staging.take(101, 101, time.monotonic() + 60) == 0, "it never can be had"
    got: list[int] = []
    waiting = threading.Thread(target=lambda: got.append(staging.take(90, 90, time.monotonic() + 60)))
    waiting.start()
    staging.give_back(25)
    waiting.join()
    assert got == [90]


def test_an_empty_token_file_does_not_open_the_control_plane(tmp_path):
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "token").write_text("\n")
    arguments = ["control", f"--secret-file={tmp_path}/secret", f"--admin-token-file={tmp_path}/token"]
    answer = CliRunner().invoke(app, [*arguments, "--listen=127.0.0.1:0", f"--state={tmp_path}/db"])
    assert answer.exit_code == 1
    assert "is empty" in answer.output
    with closing(ControlState(":memory:", time.time)) as state:
        api = TestClient(build_app(state, "", SECRET))
        for header in ("Bearer ", "Bearer", ""):
            assert api.get("/v1/credentials", headers={"Authorization": header}).status_code == 401


def test_refused_logins_are_counted_and_logged(caplog):
    caplog.set_level(logging.WARNING)
    with running_agent(is_open=False, secret=SECRET) as agent:
        for _ in range(3):
            with (
                pytest.raises(EmsException),
                session(agent.config.socket, new_kv(), access_id="nobody", access_key="0" * 32) as cc,
            ):
                cc.save(slots_of(0), [1], [4])
        assert gauge(agent, "auth_failures_total") == 3
    assert "access_id 'nobody', process" in caplog.text
    with closing(ControlState(":memory:", time.time)) as state:
        api = TestClient(build_app(state, "token", SECRET, frozenset({"testserver"})))
        api.get("/v1/nodes", headers={"Authorization": "Bearer no"})
        assert "ems_control_refused_total 1.0" in api.get("/metrics").text
    assert "GET /v1/nodes from testclient" in caplog.text


def test_a_flood_of_refused_logins_is_a_line_a_second(caplog):
    now_s = [10.0]
    refused = RefusedLogins("a login", lambda: now_s[0])
    for _ in range(5):
        refused.note("x")
    now_s[0] += 1.5
    refused.note("y")
    assert [record.message for record in caplog.records] == [
        "a login was refused: x",
        "a login was refused: y (4 more were)",
    ]
    assert refused.count == 6


class SignallingLock:
    """A lock that sets `wanted` when a second thread wants it."""

    def __init__(self, wanted: threading.Event) -> None:
        self._lock = threading.Lock()
        self._wanted = wanted

    def __enter__(self) -> None:
        if self._lock.locked():
            self._wanted.set()
        self._lock.acquire()

    def __exit__(self, *_error: object) -> None:
        self._lock.release()


def test_what_two_threads_count_is_all_counted():
    counts, has_met = Counts(), threading.Event()
    counts._lock = SignallingLock(has_met)
    other = threading.Thread(target=lambda: (counts.add("hits"), has_met.set()))

    class Two(int):
        """A number that lets another thread count while it is being added."""

        def __radd__(self, before: int) -> int:
            other.start()
            assert has_met.wait(WAIT_S)
            return before + 2

    counts.add("hits", Two())
    other.join()
    counts.raise_to("evicted", 5)
    counts.raise_to("evicted", 3)
    assert (dict(counts), counts["never"]) == ({"hits": 3, "evicted": 5}, 0)
