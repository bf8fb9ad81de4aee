"""Nodes read from each other: two or three agents of this process on loopback."""

import socket
from contextlib import ExitStack, closing

import pytest

from ems import CcKvOption, CcResult
from ems.common.channel import Channel
from ems.wire import messages as m
from kvloom.pool import reading
from kvloom.pool.cluster.peers import Peers
from kvloom.pool.config import Address
from tests.support.pool.agents import (
    SECRET,
    blocks_of,
    copy_of,
    has_pushed,
    new_kv,
    running_agent,
    session,
    slots_of,
    tokens_of,
    zero,
)
from tests.support.waiting import soon, until


@pytest.fixture
def cluster():
    """Three nodes that know each other."""
    with ExitStack() as stack:
        agents = []
        for i in range(3):
            # a peer at whose address nothing listens makes the node join the cluster; the real ones are set below
            changes = {
                "node_id": f"n{i}",
                "listen": ("127.0.0.1", 0),
                "secret": SECRET,
                "peers": (Address("x", "127.0.0.1", 1),),
            }
            agents.append(stack.enter_context(running_agent(**changes)))
        addresses = [Address(a.config.node_id, "127.0.0.1", a.peer_port) for a in agents]
        for agent in agents:
            agent.peers.set_members(addresses)
        yield agents


def save_all(agent, cc, hashes, **option):
    assert cc.save(slots_of(*range(len(hashes))), hashes, [4] * len(hashes), CcKvOption(**option)).success == len(
        hashes
    )
    until(lambda: has_pushed(agent))


def test_what_one_node_saves_the_others_load(cluster):
    hashes = list(range(40))
    kv, other_kv = new_kv(), new_kv(seed=1)
    before = copy_of(kv)
    with session(cluster[0].config.socket, kv) as cc, session(cluster[1].config.socket, other_kv) as other:
        save_all(cluster[0], cc, hashes)
        local = other.load(slots_of(*range(40)), hashes, [4] * 40, CcKvOption(read_local_only=True)).success
        assert local < 40
        assert other.exists(hashes) == 40
        assert other.load(slots_of(*range(40)), hashes, [4] * 40) == CcResult(40, 40)
        assert (tokens_of(other_kv, slots_of(*range(40))) == tokens_of(before, slots_of(*range(40)))).all()
        again = other.load(slots_of(*range(40)), hashes, [4] * 40, CcKvOption(read_local_only=True))
        assert again == CcResult(40, 40), "what came from other nodes stays in the read cache"
    for agent in cluster:
        agent.node.pool("default").check()


def test_a_long_load_comes_in_parts_and_is_one_to_its_caller(cluster, monkeypatch):
    monkeypatch.setattr(reading, "_PART_BYTES", 4096)
    kv, other_kv = new_kv(), new_kv(seed=1)
    before = copy_of(kv)
    with session(cluster[0].config.socket, kv) as cc, session(cluster[1].config.socket, other_kv) as other:
        for first in (0, 1000):
            hashes = list(range(first, first + 40))
            save_all(cluster[0], cc, hashes)
            zero(other_kv)
            assert other.load(slots_of(*range(40)), hashes, [4] * 40) == CcResult(40, 40)
            assert (tokens_of(other_kv, slots_of(*range(40))) == tokens_of(before, slots_of(*range(40)))).all()
    counts = cluster[1].node.pool("default").counts
    assert counts["load_keys"] == counts["load_hits"] == 80
    until(lambda: all(block.pins == 0 for agent in cluster for block in blocks_of(agent.node.pool("default"))))


def test_without_write_rcache_only_the_home_keeps_a_block(cluster):
    hashes = list(range(100, 140))
    kv = new_kv()
    with session(cluster[0].config.socket, kv) as cc:
        save_all(cluster[0], cc, hashes, write_rcache=False)
        assert cluster[0].node.pool("default").usage()["rcache_bytes"] == 0
        blocks = [agent.node.pool("default").usage()["blocks"] for agent in cluster]
        assert sum(blocks) == 40
        assert min(blocks) >= 3
        zero(kv)
        assert cc.load(slots_of(*range(40)), hashes, [4] * 40) == CcResult(40, 40)


def test_a_dead_peer_costs_its_blocks_and_no_error(cluster):
    hashes = list(range(200, 240))
    kv = new_kv()
    with session(cluster[0].config.socket, kv) as cc, session(cluster[1].config.socket, kv) as other:
        save_all(cluster[0], cc, hashes, write_rcache=False)
        cluster[2].close()
        result = other.load(slots_of(*range(40)), hashes, [4] * 40, CcKvOption(timeout=60_000))
        assert result.success < 40
        assert cc.save(slots_of(*range(40)), [h + 1000 for h in hashes], [4] * 40).success == 40
        assert other.exists([h + 1000 for h in hashes], CcKvOption(read_local_only=True)) < 40


def test_a_draining_node_is_read_but_not_written(cluster):
    kv = new_kv()
    addresses = [Address(a.config.node_id, "127.0.0.1", a.peer_port) for a in cluster]
    with session(cluster[0].config.socket, kv) as cc:
        save_all(cluster[0], cc, list(range(40)), write_rcache=False)
        for agent in cluster:
            agent.peers.set_members(addresses, frozenset({"n2"}))
        before = cluster[2].node.pool("default").usage()["blocks"]
        assert before > 0
        assert cc.load(slots_of(*range(40)), list(range(40)), [4] * 40).success == 40
        save_all(cluster[0], cc, list(range(50, 90)), write_rcache=False)
        assert cluster[2].node.pool("default").usage()["blocks"] == before


def test_a_peer_without_the_secret_is_refused(cluster):
    with socket.create_connection(("127.0.0.1", cluster[0].peer_port)) as sock:
        channel = Channel(sock)
        limit = soon()
        channel.send(m.Hello("n1", bytes(32), is_peer=True), limit)
        assert isinstance(channel.receive(limit).message, m.Challenge)
        channel.send(m.Proof(bytes(32)), limit)
        assert isinstance(channel.receive(limit).message, m.Failure)
    assert cluster[0].node.counts["auth_failures"] == 1


def test_a_node_that_is_called_as_its_peer_is_refused_and_both_say_so(cluster, caplog):
    one, other = cluster[:2]
    object.__setattr__(other.config, "node_id", "n0")
    keys = [bytes([number]) * 32 for number in range(8)]
    with closing(Peers("n0", SECRET)) as peers:
        peers.set_members([Address("n1", "127.0.0.1", other.peer_port)])
        assert peers.has("default", keys, soon()) == [False] * 8
    texts = [record.getMessage() for record in caplog.records]
    told = "two agents are called 'n0': give each its own --node-id"
    assert [told in text for text in texts] == [True, True], texts
    assert one.node.counts["auth_failures"] == other.node.counts["auth_failures"] == 0


def test_a_client_is_not_served_over_tcp(cluster):
    with socket.create_connection(("127.0.0.1", cluster[0].peer_port)) as sock:
        channel = Channel(sock)
        limit = soon()
        channel.send(m.Hello("", bytes(32)), limit)
        assert isinstance(channel.receive(limit).message, m.Failure)
