"""A body that does not arrive in time is answered with 408 in the shape of its route, and its connection ends."""

import http.client
import json
import socket
import ssl
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from kvloom.net.devcerts import make_files
from kvloom.server.http.slow import BodyTimeoutMiddleware
from kvloom.server.secure.tls import tls_context
from tests.support.servers import MODEL, FakeServer, fake_server
from tests.support.waiting import WAIT_S

LIMIT_S = 0.3
TEXT = "the request body did not arrive in 0.3 s"
SHAPES = {
    "/v1/completions": {
        "error": {"message": TEXT, "type": "invalid_request_error", "param": None, "code": None},
    },
    "/v1/messages": {"type": "error", "error": {"type": "invalid_request_error", "message": TEXT}},
    "/api/chat": {"error": TEXT},
    "/generate": {"error": TEXT, "error_type": "timeout"},
    f"/v2/models/{MODEL}/infer": {"error": TEXT, "error_type": "timeout"},
}
LENGTH = "Content-Length: 10\r\n"
BEGINNINGS = {
    "with a length": (LENGTH, b'{"a'),
    "no byte": (LENGTH, b""),
    "in chunks": ("Transfer-Encoding: chunked\r\n", b'3\r\n{"a\r\n'),
    "packed": (f"Content-Encoding: gzip\r\n{LENGTH}", b"\x1f\x8b"),
}


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with fake_server(wrap=partial(BodyTimeoutMiddleware, limit_s=LIMIT_S)) as running:
        yield running


def connected(server: FakeServer) -> socket.socket:
    host, port = server.url.partition("://")[2].split(":")
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


def begin(sock: socket.socket, path: str, head: str, body: bytes) -> None:
    sock.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{head}\r\n".encode() + body)


def answer(sock: socket.socket) -> tuple[int, str | None, object]:
    """Status, `connection` and body of the next answer."""
    with http.client.HTTPResponse(sock) as response:
        response.begin()
        return response.status, response.getheader("connection"), json.loads(response.read())


@pytest.mark.parametrize("path", SHAPES)
def test_each_dialect_says_so_in_its_shape(server: FakeServer, path: str):
    with connected(server) as sock:
        begin(sock, path, *BEGINNINGS["with a length"])
        assert answer(sock) == (408, "close", SHAPES[path])
        assert sock.recv(1) == b""


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_however_it_begins(server: FakeServer, beginning: str):
    with connected(server) as sock:
        begin(sock, "/generate", *BEGINNINGS[beginning])
        assert answer(sock) == (408, "close", SHAPES["/generate"])
        assert sock.recv(1) == b""


def test_also_after_it_was_told_to_go_on(server: FakeServer):
    with connected(server) as sock:
        begin(sock, "/generate", f"Expect: 100-continue\r\n{LENGTH}", b"")
        told = b"HTTP/1.1 100 Continue\r\n\r\n"
        assert sock.recv(len(told), socket.MSG_WAITALL) == told
        assert answer(sock) == (408, "close", SHAPES["/generate"])


def test_the_request_before_it_on_the_connection_has_its_answer(server: FakeServer):
    body = json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 1}).encode()
    with connected(server) as sock, sock.makefile("rb") as answers:
        whole = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        )
        sock.sendall(whole + b"POST /generate HTTP/1.1\r\nHost: localhost\r\n" + LENGTH.encode() + b"\r\n{")
        text = answers.read()
    assert text.startswith(b"HTTP/1.1 200 ")
    assert text.count(b"HTTP/1.1 ") == 2
    assert b"HTTP/1.1 408 " in text


def test_over_tls(tmp_path: Path):
    files = make_files(tmp_path)
    client = ssl.create_default_context(cafile=str(tmp_path / "client/ca.pem"))
    client.load_cert_chain(tmp_path / "client/client.pem", tmp_path / "client/client.key.pem")
    wrap = partial(BodyTimeoutMiddleware, limit_s=LIMIT_S)
    with (
        fake_server(tls=tls_context(files), wrap=wrap) as running,
        connected(running) as plain,
        client.wrap_socket(plain, server_hostname="127.0.0.1") as sock,
    ):
        begin(sock, "/generate", *BEGINNINGS["with a length"])
        assert answer(sock) == (408, "close", SHAPES["/generate"])


def test_one_that_arrives_in_time_is_read():
    with fake_server(wrap=partial(BodyTimeoutMiddleware, limit_s=WAIT_S)) as running, connected(running) as sock:
        body = json.dumps({"inputs": "hi", "parameters": {"max_new_tokens": 1}}).encode()
        begin(sock, "/generate", f"Content-Length: {len(body)}\r\n", body[:5])
        assert httpx.get(f"{running.url}/health").status_code == 200  # so it has read what was sent
        sock.sendall(body[5:])
        assert answer(sock)[0] == 200
