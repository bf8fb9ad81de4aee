"""Every way in which an agent refuses a call: each is counted once, under a cause that docs/ems.md lists."""

import contextlib
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ems.common.exception import EmsException
from ems.keys import KEY_BYTES, NONCE_BYTES
from ems.transport import Link, SegmentMaps
from ems.wire import messages as m
from ems.wire.frames import FrameWriter
from kvloom.pool import agent as agents
from kvloom.pool import session as sessions
from kvloom.pool.auth import new_credential
from kvloom.pool.metrics import render
from kvloom.pool.storage import headroom
from kvloom.pool.storage.budget import Refusal
from kvloom.pool.storage.counts import Denial
from tests.support.pool.agents import SECRET, running_agent
from tests.support.waiting import WAIT_S, soon, until

pytestmark = pytest.mark.usefixtures("either_kind")
ROW = re.compile(r"ems_(\w+)_total\{(.*)\} (\S+)")
LABEL = re.compile(r'(\w+)="([^"]*)"')


def counted(agent, what: str) -> dict[tuple[str, str], int]:
    """The values of the metric `what`, by tenant and cause, or by tenant and status."""
    found = {}
    for name, labels, count in ROW.findall(render([agent.stats()]).decode()):
        if name == what:
            named = dict(LABEL.findall(labels))
            found[named["tenant"], named.get("cause") or named["status"]] = int(float(count))
    return found


@contextlib.contextmanager
def linked(agent, access_id: str = "", access_key: str = "") -> Iterator[Link]:
    link = Link(agent.config.socket, access_id, access_key, SegmentMaps(), soon())
    with contextlib.closing(link):
        yield link


def key_of(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "big")


def refused(link: Link, message: m.Message, deadline_s: float | None = None) -> str:
    with pytest.raises(EmsException) as caught:
        link.call(message, deadline_s or soon())
    return str(caught.value)


@pytest.mark.parametrize("is_chain", [True, False])
@pytest.mark.parametrize(("changes", "cause"), [({}, "pinned"), ({"put_rate": 1 << 16}, "rate")])
def test_a_save_that_ends_early_is_refused_once_however_much_of_it_was_under_way(is_chain, changes, cause):
    with running_agent(pool_bytes=1 << 20, slab_bytes=1 << 18, **changes) as agent, linked(agent) as link:
        link.arena(1 << 20, 1 << 20, soon())
        for batch in (1, 2):
            for part in range(4):
                keys = [key_of(1000 * batch + 8 * part + i) for i in range(8)]
                offsets, lengths = [i << 16 for i in range(8)], [1 << 16] * 8
                link.begin(m.Save(b"".join(keys), offsets, lengths, is_last=part == 3, is_chain=is_chain), soon())
            answers = [link.finish(m.Message, soon()) for _ in range(4)]
            statuses = b"".join(answer.statuses for answer in answers)
            num_done = len(statuses) - len(statuses.lstrip(b"\0"))
            assert len(set(statuses[num_done:])) == 1, "what follows is not tried"
            assert counted(agent, "refused") == {("default", cause): batch}
            saved = {status: count for (_tenant, status), count in counted(agent, "saves").items()}
            assert sum(saved.values()) - saved.get("stored", 0) == batch
            time.sleep(0.05 if changes else 0)
        if not changes:
            assert link.call(m.Save(key_of(1), [0], [4096]), soon()) == m.Saved(b"\0"), "the next is tried"


@pytest.mark.parametrize("turn", [0, 1])
def test_a_save_during_which_keys_change_ends_as_any_other(turn):
    """Its blocks are not pinned for longer, and what it was refused does not end the next one."""
    with running_agent(pool_bytes=1 << 20, slab_bytes=1 << 18) as agent, linked(agent) as link:
        link.arena(1 << 20, 1 << 20, soon())
        for batch in (1, 2):
            for part in range(2):
                if part == turn:
                    agent.node.keyring.replace([])
                keys = b"".join(key_of(1000 * batch + 30 * part + i) for i in range(30))
                saved = link.call(m.Save(keys, [0] * 30, [1 << 16] * 30, is_last=part == 1), soon())
                assert isinstance(saved, m.Saved)
                assert saved.statuses.endswith(b"\3")
            agent.node.keyring.replace([])
            assert link.call(m.Save(key_of(batch), [0], [4096]), soon()) == m.Saved(b"\0")


def test_what_a_session_is_refused_is_counted_for_its_tenant(monkeypatch):
    with running_agent(staging_bytes=1 << 20) as agent, linked(agent) as link, linked(agent) as other:
        for wrong in (
            m.Arena(2 << 20, 2 << 20),
            m.Arena(0, 0),
            m.Segment(99),
            m.Save(key_of(1), [0], [4096]),
        ):
            refused(link, wrong)
        assert counted(agent, "denied") == {("default", "invalid"): 4}
        link.arena(1 << 20, 1 << 20, soon())
        assert "--staging" in refused(other, m.Arena(4096, 4096), time.monotonic() + 0.1)
        assert counted(agent, "denied") == {("default", "invalid"): 4, ("default", "staging"): 1}
        link.close()
        until(lambda: agent.node.staging.used_bytes == 0)

        def no_memory(*_arguments: object, **_options: object) -> None:
            raise OSError("none")

        with monkeypatch.context() as patch:
            patch.setattr(headroom, "available_bytes", lambda: headroom.memory_bytes() // headroom.STAGING_SHARE)
            assert "no memory for a staging area: of " in refused(other, m.Arena(4096, 4096))
        monkeypatch.setattr(agent.node.staging.headroom, "_refused_until_s", 0.0)
        monkeypatch.setattr(sessions, "SharedMemory", no_memory)
        assert "no memory for a staging area: none" in refused(other, m.Arena(4096, 4096))
        assert other.call(m.Reserve(key_of(1), [4096]), soon()).statuses == bytes([m.Status.NO_ROOM])
        other.begin(m.Count(1), soon())
        with pytest.raises(ConnectionError):
            other.finish(m.Message, soon())
        until(lambda: ("default", "malformed") in counted(agent, "denied"))
        causes = {cause: count for (_tenant, cause), count in counted(agent, "denied").items()}
        assert causes == {"invalid": 4, "staging": 1, "no_memory": 2, "not_direct": 1, "malformed": 1}
        assert agent.node.counts["sessions_broken"] == 0
        assert counted(agent, "refused") == {}


def test_a_load_that_finds_no_lease_is_counted():
    with running_agent() as agent, linked(agent) as link:
        link.arena(4096, 4096, soon())
        assert link.call(m.Save(key_of(1), [0], [4096]), soon()).statuses == bytes([m.Status.STORED])
        for _ in range(1024):
            assert link.call(m.Load(key_of(1), True), soon()).lease
        assert counted(agent, "denied") == {}
        for request in (m.Load(key_of(1), True), m.Pick(key_of(1), True)):
            assert link.call(request, soon()).lease == 0
        assert link.call(m.Load(key_of(2), True), soon()).lease == 0, "it is not there, and nothing is refused"
        assert counted(agent, "denied") == {("default", "leases"): 2}


def test_a_revoked_key_and_a_wrong_one_are_counted():
    with running_agent(is_open=False, secret=SECRET) as agent:
        agent.node.replace_credentials([new_credential("a", "team", "k" * 32)])
        with linked(agent, "a", "k" * 32) as link:
            agent.node.replace_credentials([])
            assert "revoked" in refused(link, m.Ping())
        with pytest.raises(EmsException), linked(agent, "a", "k" * 32):
            pass
        assert counted(agent, "denied") == {("team", "revoked"): 1}
        assert agent.node.counts["auth_failures"] == 1


def test_callers_that_do_not_say_who_they_are_are_counted_for_no_tenant(monkeypatch):
    def call(agent, *messages: m.Message, raw: bytes = b"") -> None:
        """Sends messages and `raw`; returns when the agent has closed the connection."""
        with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(ConnectionError):
            sock.settimeout(WAIT_S)
            sock.connect(str(agent.config.socket))
            sock.sendall(b"".join(FrameWriter().encode(message, 1) for message in messages) + raw)
            while sock.recv(4096):
                pass

    with running_agent() as agent:
        call(agent, m.Ping())
        call(agent, raw=b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        hello = m.Hello("", bytes(NONCE_BYTES))
        call(agent, hello, m.Ping())
        until(lambda: counted(agent, "denied") == {("", "malformed"): 3})
        monkeypatch.setattr(sessions, "_HANDSHAKE_S", 0.05)
        call(agent, hello)
        until(lambda: counted(agent, "denied") == {("", "malformed"): 3, ("", "late"): 1})

        class NoThread:
            def __init__(self, **_options: object) -> None:
                raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(agents.threading, "Thread", NoThread)
            call(agent)
        assert counted(agent, "denied")["", "no_thread"] == 1


def test_who_closes_its_connection_is_not_counted():
    with running_agent() as agent:
        for _ in range(3):
            with linked(agent):
                pass
        until(lambda: agent.stats().gauges["sessions"] == 0)
        assert (counted(agent, "denied"), agent.node.counts["sessions_broken"]) == ({}, 0)


@pytest.mark.parametrize("is_direct", [False, True])
def test_blocks_that_are_not_stored_are_counted_once_however_they_are_written(either_kind, is_direct):
    with running_agent(put_rate=1, is_direct=is_direct) as agent, linked(agent) as link:
        link.arena(8192, 4096, soon())

        def save(number: int) -> m.Status:
            if not is_direct:
                return m.Status(link.call(m.Save(key_of(number), [0], [4096]), soon()).statuses[0])
            status = m.Status(link.call(m.Reserve(key_of(number), [4096]), soon()).statuses[0])
            if status is m.Status.STORED:
                link.call(m.Commit(bytes(m.SUM_BYTES)), soon())
            return status

        assert [save(1), save(2)] == [m.Status.STORED, m.Status.LIMITED]
        assert counted(agent, "refused") == {("default", "rate"): 1}
        assert counted(agent, "saves") == {("default", "stored"): 1, ("default", "limited"): 1}


def test_every_cause_is_in_the_document():
    text = (Path(__file__).parents[2] / "docs" / "ems.md").read_text()
    assert [cause for cause in (*Denial, *Refusal) if not re.search(rf"\b{cause}\b", text)] == []
