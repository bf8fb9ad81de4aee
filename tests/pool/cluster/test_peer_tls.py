"""Nodes that read from each other over mutual TLS: which peers are accepted, and what refused ones cost."""

import logging
import os
import signal
import socket
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import pytest
from typer.testing import CliRunner

from kvloom.net.devcerts import issue, issue_node, make_authority, make_files
from kvloom.net.tlsconfig import TlsError
from kvloom.pool.cli import app
from kvloom.pool.cluster.secured import CertificateRefused, TlsBroken
from kvloom.pool.cluster.tls_channel import NodeTls, TlsChannel
from kvloom.pool.config import Address, AgentConfig
from tests.support.pool.agents import SECRET, config_of, has_pushed, running_agent, session
from tests.support.pool.faults import AgentProcess, Oracle
from tests.support.pool.node_proxy import tcp_pair
from tests.support.pool.node_tls import NodeFiles
from tests.support.waiting import WAIT_S, soon, until

HASHES = list(range(1, 25))
LONG_MS = 60_000  # a timeout that no call here depends on
NOWHERE = (Address("x", "127.0.0.1", 1),)


@pytest.fixture
def files(tmp_path):
    return NodeFiles(tmp_path)


@contextmanager
def two(a_tls, b_tls):
    """Two nodes, a and b, in this process that know each other; `*_tls` may be None."""
    common = {"listen": ("127.0.0.1", 0), "secret": SECRET, "peers": NOWHERE}
    with (
        running_agent(node_id="a", tls=a_tls, **common) as a,
        running_agent(node_id="b", tls=b_tls, **common) as b,
    ):
        addresses = [Address(agent.config.node_id, "127.0.0.1", agent.peer_port) for agent in (a, b)]
        for agent in (a, b):
            agent.peers.set_members(addresses)
        yield a, b


def count(agent, name):
    return agent.node.pool("default").counts[name]


def save_at(agent, hashes=HASHES, **option):
    oracle = Oracle()
    with session(agent.config.socket, oracle.kv) as cc:
        return oracle.save(cc, hashes, **option)


def load_at(agent, hashes=HASHES, **option):
    oracle = Oracle()
    with session(agent.config.socket, oracle.kv) as cc:
        return oracle.load(cc, hashes, **option)


def hang_up(link):
    for line in (*link._loads, link._saves):
        with line._lock:
            line._hang_up()


def blocks(agent):
    return agent.node.pool("default").usage()["blocks"]


def test_blocks_are_pushed_and_loaded_inside_tls(files):
    with two(files.config("a"), files.config("b")) as (a, b):
        assert save_at(a, write_rcache=False) == len(HASHES)
        until(lambda: blocks(a) + blocks(b) == len(HASHES))
        assert min(blocks(a), blocks(b)) > 0
        assert load_at(a) == load_at(b) == len(HASHES)
        assert save_at(a, [h + 1000 for h in HASHES]) == len(HASHES)
        until(lambda: count(a, "push_done") > 0)
        for agent in (a, b):
            link = next(iter(agent.peers._links.values()))
            assert isinstance(link._loads[0]._channel, TlsChannel)
            assert link._loads[0]._channel.tls.get_protocol_version_name() == "TLSv1.3"
            assert count(agent, "peer_reads") > 0
            agent.node.pool("default").check()


def bad_sides(files):
    """a's TLS files, and b's by what is wrong with them."""
    other = make_authority("test CA")  # the same name, another key
    revoked = issue_node(files.authority, "revoked")
    good = files.config("a")
    files.revoke(good, revoked)
    return good, {
        "of another CA": files.config("b1", issue_node(other, "b")),
        "trusts another CA": files.config("b2", None, other),
        "revoked": files.config("b3", revoked),
        "good": files.config("b4"),
    }


@pytest.mark.parametrize("who", ["of another CA", "trusts another CA", "revoked", "good"])
def test_only_nodes_of_the_ca_exchange_blocks(files, who, caplog):
    good, others = bad_sides(files)
    with caplog.at_level(logging.WARNING, "kvloom.pool"), two(good, others[who]) as (a, b):
        save_at(a)
        save_at(b, [h + 100 for h in HASHES])
        until(lambda: has_pushed(a, b))
        loaded = load_at(b, timeout=LONG_MS), load_at(a, [h + 100 for h in HASHES], timeout=LONG_MS)
        if who == "good":
            assert loaded == (len(HASHES), len(HASHES))
            assert caplog.text == ""
            return
        assert max(loaded) < len(HASHES)
        assert count(a, "peer_writes") == count(b, "peer_writes") == count(a, "peer_reads") == 0
        assert "certificate" in caplog.text


def test_an_expired_certificate_is_refused_by_both_ends(files):
    """A node does not start with an expired certificate, but one may expire while it runs."""
    expired = issue_node(files.authority, "b", start_days=-20, num_days=10)
    good = NodeTls(files.config("a"))
    with pytest.raises(TlsError, match="expired"):
        NodeTls(files.config("b", expired))
    config = files.config("old", expired)
    for is_server in (True, False):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if is_server else ssl.PROTOCOL_TLS_SERVER)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.load_cert_chain(config.cert, config.key)
        with pytest.raises(CertificateRefused, match="expired"):
            shake_hands(good, is_server, context)


def test_a_revoked_certificate_is_told_as_such(files):
    """To the node that refuses it, before any blocks pass, and to the one that is refused."""
    revoked, good = issue_node(files.authority, "revoked"), files.config("a")
    files.revoke(good, revoked)
    here, there = tcp_pair()
    refusing = NodeTls(good).channel(here, is_server=True)
    refused = NodeTls(files.config("b", revoked)).channel(there, is_server=False)
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(lambda: (refused.handshake(soon()), refused.receive(soon())))
        with pytest.raises(CertificateRefused, match=r"its certificate is refused, certificate revoked"):
            refusing.handshake(soon())
        refusing.close()
        with pytest.raises(TlsBroken, match="alert certificate revoked"):
            asked.result()
    refused.close()


def test_a_caller_without_a_certificate_or_with_an_old_protocol_is_refused(files):
    good = NodeTls(files.config("a"))
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname = False
    bare.verify_mode = ssl.CERT_NONE
    with pytest.raises(TlsBroken, match=r"(?i)did.not.return.a.certificate"):
        shake_hands(good, True, bare)
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname = False
    old.verify_mode = ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    config = files.config("b")
    old.load_cert_chain(config.cert, config.key)
    with pytest.raises(TlsBroken, match=r"(?i)unsupported.protocol"):
        shake_hands(good, True, old)


def shake_hands(ours, is_server, theirs):
    """Performs our end's handshake with a peer that has the context `theirs`; raises what our end raises."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = socket.create_connection(listener.getsockname(), timeout=WAIT_S)
        here, _address = listener.accept()

    def answer():
        with suppress(OSError), theirs.wrap_socket(there, server_side=not is_server) as wrapped:
            wrapped.recv(1)

    thread = threading.Thread(target=answer)
    thread.start()
    channel = TlsChannel(ours, here, is_server)
    try:
        channel.handshake(soon())
    finally:
        channel.close()
        thread.join()


@pytest.mark.parametrize("encrypted", ["a", "b"])
def test_tls_and_plain_text_do_not_meet(files, encrypted, caplog):
    tls = files.config(encrypted)
    sides = (tls, None) if encrypted == "a" else (None, tls)
    with caplog.at_level(logging.WARNING, "kvloom.pool"), two(*sides) as (a, b):
        for start in (0, 100, 200):
            save_at(a, [h + start for h in HASHES], write_rcache=False)
            assert load_at(b, [h + start for h in HASHES], timeout=LONG_MS) < len(HASHES)
            for agent in (a, b):
                agent.peers._links["b" if agent is a else "a"].breaker.succeed()
        assert count(a, "peer_writes") == count(b, "peer_writes") == 0
        for agent in (a, b):
            agent.node.pool("default").check()
    lines = [record.getMessage() for record in caplog.records]
    callers = [line for line in lines if line.startswith("peer ")]
    assert len(callers) <= 4, callers
    assert {line.split(" ")[1] for line in callers} == {"a", "b"}
    assert any("this node speaks TLS" in line for line in lines)
    assert any("this node speaks plain text" in line for line in lines)
    assert len(lines) <= 8, lines


def test_a_silent_caller_is_let_go_and_others_are_served(files):
    with (
        two(files.config("a"), files.config("b")) as (a, b),
        socket.create_connection(("127.0.0.1", a.peer_port), timeout=WAIT_S) as silent,
    ):
        save_at(a)
        until(lambda: has_pushed(a))
        assert load_at(b) == len(HASHES)
        assert silent.recv(1) == b""


def test_a_reload_while_blocks_travel_costs_none_and_counts_for_new_connections(files):
    a_files, b_files = files.config("a"), files.config("b")
    with two(a_files, b_files) as (a, b):
        stop = threading.Event()

        def reload_on() -> None:
            while not stop.is_set():
                a.reload_tls()
                b.reload_tls()

        thread = threading.Thread(target=reload_on)
        thread.start()
        try:
            for start in range(0, 300, 50):
                hashes = [h + start for h in HASHES]
                save_at(a, hashes)
                until(lambda: has_pushed(a))
                assert load_at(b, hashes) == len(HASHES)
                hang_up(a.peers._links["b"])
        finally:
            stop.set()
            thread.join()
        revoked = issue_node(files.authority, "b")
        files.show(b_files, revoked)
        files.revoke(a_files, revoked)
        a.reload_tls()
        b.reload_tls()
        for agent, other in ((a, "b"), (b, "a")):
            hang_up(agent.peers._links[other])
        save_at(a, [h + 1000 for h in HASHES])
        assert load_at(b, [h + 1000 for h in HASHES], timeout=LONG_MS) < len(HASHES)


@contextmanager
def three(files):
    """Three nodes, a, b and c, in this process; the key pairs by name; and a's files."""
    pairs = {name: issue_node(files.authority, name) for name in "abc"}
    configs = {name: files.config(name, pair) for name, pair in pairs.items()}
    common = {"listen": ("127.0.0.1", 0), "secret": SECRET, "peers": NOWHERE}
    with ExitStack() as stack:
        agents = [stack.enter_context(running_agent(node_id=n, tls=tls, **common)) for n, tls in configs.items()]
        addresses = [Address(agent.config.node_id, "127.0.0.1", agent.peer_port) for agent in agents]
        for agent in agents:
            agent.peers.set_members(addresses)
        yield agents, pairs, configs["a"]


def num_called(agent):
    """The number of connections that other nodes opened to `agent`."""
    return sum(isinstance(channel, TlsChannel) for channel in agent._sessions)


def channels(agent, other):
    link = agent.peers._links[other]
    return [link._loads[0]._channel, link._saves._channel]


def test_a_reload_ends_the_connections_of_revoked_nodes_and_of_no_others(files, caplog):
    with caplog.at_level(logging.INFO, "kvloom.pool"), three(files) as (agents, pairs, a_files):
        a, b, c = agents
        for agent in agents:
            save_at(agent, [h + 100 * agents.index(agent) for h in HASHES], write_rcache=False)
        for agent in agents:
            assert load_at(agent, [*HASHES, 101, 102]) > len(HASHES)
        assert all(channels(a, "b") + channels(b, "a"))
        kept, num_sessions = channels(a, "c") + channels(c, "a"), num_called(a)
        files.revoke(a_files, pairs["b"])
        a.reload_tls()
        assert channels(a, "b") == [None, None], "as the one that called"
        until(lambda: num_called(a) == num_sessions - 2)  # connections that b opened to a, for loads and for saves
        assert channels(a, "c") + channels(c, "a") == kept
        assert "TLS files reloaded; 4 connections of revoked nodes ended" in caplog.text
        before = [count(a, name) for name in ("peer_reads", "peer_writes")]
        save_at(b, [h + 1000 for h in HASHES], write_rcache=False, timeout=LONG_MS)
        load_at(b, [h + 100 for h in HASHES], timeout=LONG_MS)
        assert [count(a, name) for name in ("peer_reads", "peer_writes")] == before, "and it does not come back"


@pytest.mark.parametrize("is_called", [True, False])
def test_a_node_that_is_revoked_while_hands_are_shaken_is_not_let_in(files, is_called, monkeypatch):
    """Node a reads its files again after it accepted b's certificate and before it registers the connection."""
    pair = issue_node(files.authority, "b")
    a_files = files.config("a")
    with two(a_files, files.config("b", pair)) as (a, b):
        shaken = TlsChannel.handshake

        def handshake(channel, deadline_s):
            shaken(channel, deadline_s)
            if channel._files is a.tls:
                files.revoke(a_files, pair)
                a.reload_tls()

        monkeypatch.setattr(TlsChannel, "handshake", handshake)
        caller = b if is_called else a
        save_at(caller, write_rcache=False, timeout=LONG_MS)
        assert blocks(caller) == len(HASHES), "they stay where they are"
        assert count(a, "peer_writes") == count(b, "peer_writes") == 0


@pytest.mark.parametrize("option", ["--tls-ca", "--tls-cert", "--tls-key", "--tls-crl"])
def test_a_file_that_is_missing_is_told_by_its_option(option, files, tmp_path):
    good = files.config("a")
    paths = {"--tls-ca": good.ca_files[0], "--tls-cert": good.cert, "--tls-key": good.key, "--tls-crl": good.crls[0]}
    (tmp_path / "secret").write_bytes(SECRET)
    options = [f"--socket={tmp_path / 's'}", f"--secret-file={tmp_path / 'secret'}", "--listen=127.0.0.1:0"]
    options += [f"{name}={path}" for name, path in (paths | {option: tmp_path / "none"}).items()]
    answer = CliRunner().invoke(app, ["agent", *options])
    assert (
        answer.output == f"kvloom pool agent: {option}: {tmp_path / 'none'} cannot be read: No such file or directory\n"
    )


def test_bad_files_change_nothing_and_are_logged(files, caplog):
    a_files = files.config("a")
    with caplog.at_level(logging.INFO, "kvloom.pool"), two(a_files, files.config("b")) as (a, b):
        a_files.cert.write_bytes(b"nothing")
        a.reload_tls()
        save_at(a)
        until(lambda: has_pushed(a))
        assert load_at(b) == len(HASHES)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "tlsCert" in caplog.text


def test_sighup_reloads_the_process_and_a_folder_is_enough(tmp_path):
    make_files(tmp_path / "tls")
    (tmp_path / "secret").write_bytes(SECRET)
    own = (f"--secret-file={tmp_path / 'secret'}", "--listen=127.0.0.1:0", f"--tls-dir={tmp_path / 'tls'}")
    with (tmp_path / "err").open("wb") as errors, AgentProcess(tmp_path / "a.sock", *own, stderr=errors) as agent:
        for expected in ("TLS files reloaded", "the ones in use stay: --tls-dir: "):
            os.kill(agent.process.pid, signal.SIGHUP)
            until(lambda text=expected: text in (tmp_path / "err").read_text())
            (tmp_path / "tls/security/certs/node.pem").write_bytes(b"nothing")
        assert agent.process.poll() is None


def test_a_node_needs_a_certificate_for_both_roles(files):
    for pair in (issue(files.authority, "s", ("127.0.0.1",)), issue(files.authority, "c")):
        with pytest.raises(TlsError, match="must be for servers and clients"):
            NodeTls(files.config("a", pair))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "node.example", "127.example"])
def test_plain_text_beyond_loopback_must_be_asked_for(host, files):
    with pytest.raises(ValueError, match=r"listen: .*--tls-dir, or --plaintext-peers"):
        AgentConfig(secret=SECRET, listen=(host, 1))
    AgentConfig(secret=SECRET, listen=(host, 1), has_plaintext_peers=True)
    AgentConfig(secret=SECRET, listen=(host, 1), tls=files.config("a"))
    for loopback in ("127.0.0.1", "127.3.2.1", "::1", "localhost"):
        AgentConfig(secret=SECRET, listen=(loopback, 1))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--tls-dir=d", "--tls-cert=c"], "--tls-cert: --tls-dir names all files"),
        (["--tls-cert=c", "--tls-key=k"], "--tls-ca: needed beside --tls-cert"),
        (["--tls-crl=l"], "--tls-ca: needed beside --tls-crl"),
        (["--tls-dir=d"], "--tls-dir, --tls-cert: for other nodes"),
    ],
)
def test_options_that_do_not_fit_are_told(options, problem):
    with pytest.raises(ValueError, match=problem):
        config_of(*options)


def test_files_that_are_missing_end_the_start(tmp_path):
    (tmp_path / "secret").write_bytes(SECRET)
    options = [f"--socket={tmp_path / 's'}", f"--secret-file={tmp_path / 'secret'}", "--listen=127.0.0.1:0"]
    answer = CliRunner().invoke(app, ["agent", *options, f"--tls-dir={tmp_path}"])
    assert (answer.exit_code, "--tls-dir: " in answer.output) == (1, True)
