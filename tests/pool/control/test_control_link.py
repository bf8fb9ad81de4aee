"""A node's calls of the control plane: over TLS, with its token, bounded in time and size; a line per problem."""

import logging
import ssl
import threading
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest

from kvloom.net.devcerts import issue, make_authority
from kvloom.pool.auth import node_token
from kvloom.pool.cluster.peers import Peers
from kvloom.pool.config import AgentConfig
from kvloom.pool.control import link
from kvloom.pool.control.link import ControlLink
from kvloom.pool.control.state import Orders
from kvloom.pool.metrics import render
from kvloom.pool.node import Node, collect
from tests.support.pool.agents import SECRET, new_kv, running_agent, session, slots_of

ORDERS = msgspec.json.encode(Orders([], [("t", 0, 1 << 20)], {}, [], []))


class Answers:
    """A server that gives the same answer to every request, and records the requests."""

    def __init__(self, status: int = 200, body: bytes = ORDERS, **headers: str) -> None:
        self.requests: list[tuple[str, dict[str, str]]] = []
        answers = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                answers.requests.append((self.path, dict(self.headers)))
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST

            def log_message(self, format: str, *args: object) -> None:
                """Logs nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self._thread = threading.Thread(target=self.server.serve_forever)

    def __enter__(self) -> "Answers":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


@contextmanager
def linked(url: str):
    with closing(Node(AgentConfig(secret=SECRET, node_id="a", control_url=url))) as node:
        peers = Peers("a", SECRET)
        with closing(peers), closing(ControlLink(node, peers, lambda: "", lambda: collect(node, {}))) as control:
            yield node, control


def complaint(url: str, caplog: pytest.LogCaptureFixture) -> str:
    """The problem that the log names after two failed heartbeats."""
    with caplog.at_level(logging.WARNING, "kvloom.pool"), linked(url) as (node, control):
        assert not control.beat()
        assert not control.beat()
        assert node.counts["control_failures"] == 2
    (record,) = caplog.records
    text = record.getMessage()
    assert "\n" not in text
    assert text.startswith(f"the control plane {url} gave no valid answer: ")
    return text.partition("answer: ")[2]


def test_a_node_shows_its_token_and_takes_its_orders(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # which would see the token
    with Answers() as server, linked(f"http://127.0.0.1:{server.port}/pool/") as (node, control):
        assert control.beat()
        assert node.pool("t").usage()["quota_bytes"] == 1 << 20
        path, headers = server.requests[0]
    assert path == "/pool/v1/nodes/a:heartbeat"
    assert headers["Authorization"] == f"Bearer {node_token(SECRET)}"


def test_the_control_plane_knows_what_the_nodes_own_metrics_say(served):
    """Of its sessions and its staging memory too, which it said were none."""
    rows = ("ems_sessions{", "ems_sessions_limit{", "ems_staging_bytes{", "ems_staging_limit_bytes{")

    def told(text: str) -> list[str]:
        return [row for row in text.splitlines() if row.startswith(rows)]

    url = str(served.base_url).rstrip("/")
    with (
        running_agent(node_id="a", secret=SECRET, control_url=url, max_sessions=7) as agent,
        session(agent.config.socket, new_kv()) as cc,
    ):
        assert cc.save(slots_of(0), [1], [4]).success == 1
        assert agent._control.beat()
        own = told(render([agent.stats()]).decode())
        assert told(served.get("/metrics").text) == own
        assert 'ems_sessions{node="a"} 1.0' in own
        assert 'ems_sessions_limit{node="a"} 7.0' in own


def test_over_tls_the_systems_authorities_count(tmp_path, monkeypatch, caplog):
    authority = make_authority("test CA")
    pair = issue(authority, "control", ("127.0.0.1",))
    (tmp_path / "ca").write_bytes(authority.certificate_pem())
    (tmp_path / "pair").write_bytes(pair.certificate_pem() + pair.key_pem())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "pair")
    with Answers() as server:
        server.server.socket = context.wrap_socket(server.server.socket, server_side=True)
        url = f"https://127.0.0.1:{server.port}"
        assert "certificate verify failed" in complaint(url, caplog)
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca"))
        with linked(url) as (_node, control):
            assert control.beat()
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("answers", "problem"),
    [
        ({"status": 401, "body": b"no"}, "Client error '401 Unauthorized'"),
        ({"status": 409, "body": b'{"error_msg": "no\\nway"}'}, "409, no"),
        ({"status": 500, "body": b""}, "Server error '500 Internal Server Error'"),
        ({"body": b"[]"}, "Expected `object`, got `array`"),
        ({"body": ORDERS[:-1]}, "Input data was truncated"),
        ({"body": ORDERS.replace(b'"t"', b"7")}, "Expected `str`, got `int`"),
    ],
)
def test_an_answer_that_is_none_changes_nothing_and_is_told_once(answers, problem, caplog):
    with Answers(**answers) as server:
        assert problem in complaint(f"http://127.0.0.1:{server.port}", caplog)


def test_the_token_follows_no_redirection(caplog):
    with Answers() as other, Answers(307, b"", Location=f"http://127.0.0.1:{other.port}/") as server:
        assert "Redirect response '307" in complaint(f"http://127.0.0.1:{server.port}", caplog)
    assert other.requests == []


def test_an_answer_without_end_is_cut(monkeypatch, caplog):
    monkeypatch.setattr(link, "_MAX_ANSWER_BYTES", 10)
    with Answers() as server:
        assert "more than 10 bytes or 30 seconds of answer" in complaint(f"http://127.0.0.1:{server.port}", caplog)
    caplog.clear()
    monkeypatch.setattr(link, "_MAX_ANSWER_BYTES", 1 << 20)
    monkeypatch.setattr(link, "_ANSWER_S", -1.0)
    with Answers() as server:
        assert "seconds of answer" in complaint(f"http://127.0.0.1:{server.port}", caplog)


def test_one_that_is_silent_or_not_there_is_given_up(monkeypatch, caplog):
    monkeypatch.setattr(link, "_TIMEOUT_S", 0.1)
    silent = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)  # accepts no connection
    with closing(silent.socket):
        assert complaint(f"http://127.0.0.1:{silent.server_address[1]}", caplog) == "timed out"
    caplog.clear()
    assert "refused" in complaint(f"http://127.0.0.1:{silent.server_address[1]}", caplog)
