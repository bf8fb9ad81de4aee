"""A client notes on its session's board what it has read: pins end without a message, no thread wakes in vain."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ems import CcConfig_v1
from ems.common.channel import Channel
from ems.context_caching import ContextCaching
from ems.profiling import Profiler
from ems.transport import Link, LinkPool, SegmentMaps
from ems.wire import messages as m
from kvloom.pool.agent import Agent
from tests.support.pool.agents import running_agent
from tests.support.waiting import soon, until

BLOCK, NUM = 4096, 256
POOL = NUM * BLOCK


class Client:
    """A rank with NUM blocks, on its own link."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self._links = LinkPool(lambda _deadline_s: agent.config.socket, "", "")
        self.caching = ContextCaching(self._links, CcConfig_v1(rank_id=0, device_id=0, model_id="m"), Profiler())
        self.cache = np.random.default_rng(5).integers(0, 256, (NUM, 1, 1, BLOCK), np.uint8)
        self.caching.register_kvcache([[self.cache]])

    def save(self, first_hash: int = 0) -> int:
        return self.caching.save(range(NUM), range(first_hash, first_hash + NUM), [1] * NUM).success

    def load(self) -> bool:
        """Loads all blocks; returns whether all came with the bytes that were saved."""
        expected = self.cache.copy()
        self.cache[:] = 0
        done = self.caching.load(range(NUM), range(NUM), [1] * NUM)
        return done.success == NUM and bool((self.cache == expected).all())

    @property
    def link(self) -> Link:
        return self._links._idle[-1]

    @property
    def board(self) -> np.ndarray:
        assert self.link._board is not None
        return self.link._board.view(np.int64)

    def close(self) -> None:
        self.caching.close()
        self._links.close()


@pytest.fixture
def client(native: None) -> Iterator[Client]:
    """A client of an agent whose pool is full of the client's blocks."""
    with running_agent(pool_bytes=POOL) as agent:
        made = Client(agent)
        assert made.save() == NUM
        yield made
        made.close()


def num_pinned(agent: Agent) -> int:
    """The number of blocks that are being read."""
    (pool,) = agent.node.pools()
    blocks = [block for block in pool.pin_each(pool.block_keys()) if block is not None]
    pinned = sum(block.pins > 1 for block in blocks)
    pool.unpin(blocks)
    return pinned


def test_what_was_read_is_let_go_of_though_its_client_says_nothing_more(client):
    until(lambda: num_pinned(client.agent) == 0)
    assert client.board[0] == 0
    for lease in (1, 3):
        assert client.load()
        assert client.board[0] == lease
        until(lambda: num_pinned(client.agent) == 0)


def test_a_save_has_the_room_of_what_its_client_has_read(client):
    """This also holds within a batch, where the agent does nothing that can wait."""
    until(lambda: num_pinned(client.agent) == 0)
    link, keys = client.link, client.agent.node.pools()[0].block_keys()
    link.arena(BLOCK, BLOCK, soon())
    link.begin(m.Ping(), soon())
    link.begin(m.Save(keys[0], [0], [BLOCK], is_last=False), soon())
    link.begin(m.Load(b"".join(keys)), soon())
    assert [type(link.finish(m.Message, soon())) for _ in range(3)] == [m.Done, m.Saved, m.Found]
    assert num_pinned(client.agent) == NUM
    client.board[0] = 1
    assert link.call(m.Save(b"n" * 32, [0], [BLOCK], is_last=False), soon()) == m.Saved(bytes([m.Status.STORED]))


@pytest.mark.parametrize("word", [2**63 - 1, -5])
def test_what_a_client_writes_on_its_board_ends_no_pins_of_others(client, word):
    until(lambda: num_pinned(client.agent) == 0)
    other = Link(client.agent.config.socket, "", "", SegmentMaps(), soon())
    other.call(m.Ping(), soon())
    keys = client.agent.node.pools()[0].block_keys()[:5]
    found = other.call(m.Load(b"".join(keys)), soon())
    assert isinstance(found, m.Found)
    assert len(found.lengths) == len(keys)
    client.board[0] = word
    assert client.load()
    until(lambda: num_pinned(client.agent) == len(keys))
    other.close()
    client.link.close()
    until(lambda: num_pinned(client.agent) == 0)


def test_an_agent_without_the_library_has_no_board(monkeypatch):
    with running_agent() as agent, monkeypatch.context() as patch:
        patch.setenv("EMS_NATIVE", "0")
        client = Client(agent)
        assert client.save() == NUM
        patch.delenv("EMS_NATIVE")
        assert client.link._board is None
        assert client.load()
        until(lambda: num_pinned(agent) == 0)
        client.close()


def threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def is_asleep(thread: str) -> bool:
    return Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def sleeps(thread: str) -> int:
    """How many times the thread went to sleep."""
    status = Path(f"/proc/self/task/{thread}/status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


@pytest.mark.parametrize("is_native", ["1", "0"])
def test_who_waits_for_a_request_is_not_woken_when_its_answers_are_read(native, monkeypatch, is_native):
    """A Unix socket wakes a thread that sleeps in `recv` when the other end reads what was sent before."""
    num = 40
    monkeypatch.setenv("EMS_NATIVE", is_native)
    with running_agent() as agent:
        before = threads()
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(str(agent.config.socket))
        channel = Channel(sock)
        channel.send(m.Hello("", bytes(32)))
        channel.receive(soon())
        channel.send(m.Proof(bytes(32)))
        channel.receive(soon())
        for number in range(num):
            channel.send(m.Exists(bytes(32)), request_id=number)
            until(lambda: sock.recv(1 << 16, socket.MSG_PEEK))
        (session,) = threads() - before
        until(lambda: is_asleep(session))
        first = sleeps(session)
        for _ in range(num):
            assert sock.recv(28 + 2) != b""
            until(lambda: is_asleep(session))
        assert sleeps(session) - first < num // 4
        channel.close()
