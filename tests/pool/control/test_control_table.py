"""The control plane's table of nodes: which nodes are forgotten, and when."""

import sqlite3
from contextlib import closing

import pytest

from kvloom.pool.control.members import ALIVE_S, LOST_S
from kvloom.pool.control.state import Conflict, ControlState, Heartbeat
from kvloom.pool.node import NodeStats


def test_a_node_that_restarts_under_another_id_leaves_no_row():
    """Without --node-id an agent draws an id at each start. Two live nodes cannot have the same address."""
    now_s = [1000.0]
    with closing(ControlState(":memory:", lambda: now_s[0], lambda: now_s[0])) as state:

        def beat(node_id: str, address: str) -> list[str]:
            state.heartbeat(node_id, Heartbeat(address, NodeStats(node_id, [], {}), node_id))
            return [node["node_id"] for node in state.nodes()]

        for node_id, address in (("node-1", "a:1"), ("other", "b:1"), ("mute", ""), ("drained", "a:1")):
            beat(node_id, address)
        state.drain("drained", True)
        assert beat("node-2", "a:1") == ["drained", "mute", "node-1", "node-2", "other"], "it may still be alive"
        now_s[0] += ALIVE_S + 1
        assert beat("mute-2", "") == ["drained", "mute", "mute-2", "node-1", "node-2", "other"]
        assert beat("node-3", "a:1") == ["drained", "mute", "mute-2", "node-3", "other"], (
            "what an operator said is kept"
        )


def test_a_node_without_an_address_that_is_gone_for_an_hour_leaves_no_row():
    """Its blocks cannot be reached, and after a restart it has another id, by which it is not recognised."""
    now_s = [1000.0]
    with closing(ControlState(":memory:", lambda: now_s[0], lambda: now_s[0])) as state:

        def beat(node_id: str, address: str) -> list[str]:
            state.heartbeat(node_id, Heartbeat(address, NodeStats(node_id, [], {}), node_id))
            return [node["node_id"] for node in state.nodes()]

        for node_id, address in (("drained", ""), ("mute-1", ""), ("reached", "b:1")):
            beat(node_id, address)
        state.drain("drained", True)
        now_s[0] += LOST_S
        assert beat("mute-2", "") == ["drained", "mute-1", "mute-2", "reached"]
        now_s[0] += 1
        assert beat("mute-2", "") == ["drained", "mute-2", "reached"]


def test_of_two_agents_with_one_id_the_earlier_is_told_so_also_while_nothing_can_be_kept(state):
    def beat(incarnation):
        return state.heartbeat("a", Heartbeat(f"{incarnation}:1", NodeStats("a", [], {}), incarnation))

    state._db.execute("PRAGMA query_only = ON")  # a full disk
    for incarnation in ("first", "later"):
        with pytest.raises(sqlite3.OperationalError):
            beat(incarnation)
    with pytest.raises(Conflict, match="the agent at no address started later"):
        beat("first")


def test_a_node_that_was_removed_has_nothing_to_evict_when_it_comes_back(state):
    state.heartbeat("a", Heartbeat("a:1", NodeStats("a", [], {})))
    state.evict("a", "t", 1)
    state.remove_node("a")
    assert state.heartbeat("a", Heartbeat("a:1", NodeStats("a", [], {}))).evict == []
