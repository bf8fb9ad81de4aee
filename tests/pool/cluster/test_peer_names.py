"""Peers by name: unknown names, lookups that never return, and IPv6 addresses."""

import logging
import socket
import threading
import time
from contextlib import ExitStack, closing

import pytest

from ems import CcKvOption
from ems.common.breaker import Breaker
from ems.wire.messages import Cause
from kvloom.pool.cluster.peer_line import Own, PeerLine
from kvloom.pool.cluster.resolving import Lookup
from kvloom.pool.cluster.secured import Complaints
from kvloom.pool.config import Address
from tests.support.pool.agents import SECRET, new_kv, running_agent, session, slots_of
from tests.support.waiting import until

KNOWN = socket.getaddrinfo


def names_are(monkeypatch: pytest.MonkeyPatch, answer) -> None:
    """Resolves names to what `answer` returns, and addresses to themselves."""

    def look_up(host, *arguments, **options):
        return KNOWN(answer(host) if host.endswith(".example") else host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


def line_to(host: str, port: int = 1) -> PeerLine:
    return PeerLine(Address("b", host, port), Own("a", SECRET), Breaker(), Complaints())


def test_a_name_that_is_looked_up_for_ever_costs_the_deadline(monkeypatch, caplog):
    is_over = threading.Event()
    names_are(monkeypatch, lambda _host: "127.0.0.1" if is_over.wait(10) else "nowhere")
    monkeypatch.setattr("kvloom.pool.cluster.resolving._PATIENCE_S", 0.0)
    monkeypatch.setattr("kvloom.pool.cluster.peer_line._CONNECT_S", 0.1)
    with closing(line_to("slow.example")) as line, caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert line.call(time.monotonic() + 60, lambda _channel: Cause.NONE) is Cause.PEER_DOWN
        lookups = [thread for thread in threading.enumerate() if thread.name == "ems-lookup"]
        is_over.set()
    assert len(lookups) == 1, "the second call waits for the first one's lookup"
    assert [each.getMessage() for each in caplog.records] == [
        "peer b at slow.example:1: its name is not looked up in time"
    ]
    lookups[0].join()


def test_a_lookup_that_has_hardly_any_time_is_no_fault_of_the_name(monkeypatch):
    is_over = threading.Event()
    names_are(monkeypatch, lambda _host: "127.0.0.1" if is_over.wait(60) else "nowhere")
    lookup = Lookup("slow.example", 7)
    with pytest.raises(TimeoutError):
        lookup.addresses(0.0)
    is_over.set()
    assert lookup.addresses(60.0) == [("127.0.0.1", 7)]


def test_a_name_that_nobody_knows_is_told_once(monkeypatch, caplog):
    def unknown(_host):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    names_are(monkeypatch, unknown)
    with closing(line_to("typo.example")) as line, caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert line.call(time.monotonic() + 60, lambda _channel: Cause.NONE) is Cause.PEER_DOWN
    (record,) = caplog.records
    assert record.getMessage().endswith("typo.example:1: its name cannot be looked up: Name or service not known")


@pytest.mark.parametrize("host", ["::1", "node.example"])
def test_nodes_on_ipv6_read_from_each_other(monkeypatch, host):
    names_are(monkeypatch, lambda _host: "::1")
    changes = {"secret": SECRET, "listen": ("::1", 0), "peers": (Address("x", "::1", 1),)}
    with ExitStack() as stack:
        one, other = (stack.enter_context(running_agent(node_id=name, **changes)) for name in "ab")
        for agent in (one, other):
            agent.peers.set_members([Address(each.config.node_id, host, each.peer_port) for each in (one, other)])
        saved = stack.enter_context(session(one.config.socket, new_kv()))
        loaded = stack.enter_context(session(other.config.socket, new_kv()))
        assert saved.save(slots_of(*range(8)), list(range(8)), [4] * 8).local == 0
        until(lambda: loaded.exists(list(range(8)), CcKvOption(timeout=60_000)) == 8)
        assert loaded.load(slots_of(*range(8)), list(range(8)), [4] * 8).success == 8


def test_the_first_address_of_a_name_that_answers_is_used(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        found = [each for host in ("::1", "127.0.0.1") for each in KNOWN(host, port, type=socket.SOCK_STREAM)]
        monkeypatch.setattr(
            socket, "getaddrinfo", lambda host, *a, **o: found if "node" in host else KNOWN(host, *a, **o)
        )
        with closing(line_to("node.example", port)) as line, line._dialled(time.monotonic() + 60) as sock:
            assert sock.getpeername() == ("127.0.0.1", port)
