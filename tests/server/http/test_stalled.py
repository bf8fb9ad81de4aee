"""Clients that do not read their answers are disconnected; a stopping server waits neither for them nor for bodies."""

import asyncio
import contextlib
import json
import signal
import socket
import threading
from collections.abc import AsyncIterator
from typing import ClassVar

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from kvloom.server.http.slow import GuardedProtocol
from tests.support.processes import serve
from tests.support.waiting import WAIT_S, until
from tests.support.wire.triton import serving

REASON = "connection closed: nothing of its answer was taken for 0.1 s"
ENDED = threading.Event()


class Impatient(GuardedProtocol):
    stall_timeout_s = 0.1


async def endless(request: Request) -> StreamingResponse:
    async def frames() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"data: x" * 10_000
                await asyncio.sleep(0)
        finally:
            ENDED.set()

    return StreamingResponse(frames())


async def large(request: Request) -> Response:
    return Response(b"x" * 50_000_000)


APP = Starlette(routes=[Route("/endless", endless), Route("/large", large)])


def reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == GuardedProtocol.__module__]


def ask(sock: socket.socket, path: str) -> None:
    sock.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())


@pytest.mark.parametrize("path", ["/endless", "/large"])
def test_a_connection_that_takes_nothing_of_its_answer_ends(path, caplog):
    ENDED.clear()
    with serving(APP, http=Impatient) as port, socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as sock:
        ask(sock, path)
        until(lambda: reasons(caplog) == [REASON])
        if path == "/endless":
            assert ENDED.wait(WAIT_S), "its generation goes on"
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(1 << 20):
                pass


class Scripted(Impatient):
    """Stands for a transport: the number of unsent bytes at each check."""

    untaken: ClassVar[list[int]] = []

    def _num_untaken(self) -> int:
        return self.untaken.pop(0)


def test_a_connection_that_takes_a_byte_goes_on(monkeypatch, caplog):
    """The connection is closed only when two checks find the same number of unsent bytes."""
    monkeypatch.setattr(Scripted, "untaken", [9, 8, 7, 7])
    with serving(APP, http=Scripted) as port, socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as sock:
        ask(sock, "/endless")
        until(lambda: reasons(caplog) == [REASON])
    assert Scripted.untaken == []


def test_a_client_that_reads_late_gets_the_whole_answer(caplog):
    """The checks stop once the client has read everything."""
    with serving(APP) as port, socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as sock:
        ask(sock, "/large")
        left = 50_000_000
        while left > 0:
            left -= len(sock.recv(1 << 20))
    assert reasons(caplog) == []


def test_a_server_that_stops_does_not_wait_for_who_takes_nothing_and_logs_no_traceback():
    """Eight answers of 1,000 tokens with top_logprobs 20 are more than the socket buffers hold."""
    asked = {"model": "mock", "prompt": "hi", "max_tokens": 1000, "n": 8, "logprobs": 20, "stream": True}
    body = json.dumps({**asked, "ignore_eos": True})
    head = f"Host: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with serve("--backend", "fake", "--grace", "0.1") as server, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        sock.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}{body}".encode())
        until(lambda: 'generation_tokens_total{model_name="mock"} 8000' in httpx.get(server.url + "/metrics").text)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=WAIT_S) == 0
    assert not [line for line in server.lines if "Traceback" in line or "ERROR" in line]


def test_a_server_that_stops_does_not_wait_for_half_a_body_and_logs_no_traceback():
    with serve("--backend", "fake") as server, socket.socket() as sock:
        sock.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n{")
        assert httpx.get(server.url + "/health").status_code == 200  # so it has read what was sent
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=WAIT_S) == 0
        told = sock.recv(1000)
        assert told.startswith(b"HTTP/1.1 503 ")
        assert b"the server is stopping" in told
    assert not [line for line in server.lines if "Traceback" in line]
