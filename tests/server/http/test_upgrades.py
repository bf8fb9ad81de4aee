"""Offers to change the protocol are declined: the request is answered in HTTP/1.1, with its body (RFC 9110, 7.8)."""

import socket
from collections.abc import Iterator, Sequence

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.support.waiting import WAIT_S
from tests.support.wire.triton import serving


async def echo(request: Request) -> Response:
    return Response(await request.body(), headers={"X-Method": request.method})


APP = Starlette(routes=[Route("/echo", echo, methods=["GET", "POST"])])
# as Java's HTTP client sends it unless told otherwise
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
WEBSOCKET = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: YQ==\r\n"


def request(body: bytes, offer: bytes = H2C, method: bytes = b"POST") -> bytes:
    return b"%b /echo HTTP/1.1\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n%b" % (method, offer, len(body), body)


CHUNKED = (
    b"POST /echo HTTP/1.1\r\nHost: x\r\n" + H2C + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
)
EXPECTING = request(b"abcde", H2C + b"Expect: 100-continue\r\n")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving(APP) as port:
        yield port


def answered(port: int, pieces: Sequence[bytes]) -> bytes:
    """All that the server answers, until it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            sock.sendall(piece)
        with sock.makefile("rb") as answer:
            return answer.read()


LAST = request(b"last", b"Connection: close\r\n")


@pytest.mark.parametrize(
    ("sent", "bodies"),
    [
        (request(b"abcde"), [b"abcde"]),
        (CHUNKED, [b"abcde"]),
        (request(b"", WEBSOCKET, b"GET"), [b""]),
        (request(b"abcde", WEBSOCKET), [b"abcde"]),
        (request(b"one") + request(b"", b"") + request(b"three"), [b"one", b"", b"three"]),
        (2000 * request(b""), 2000 * [b""]),
    ],
    ids=["h2c", "chunked", "websocket", "websocket with a body", "pipelined", "many pipelined"],
)
@pytest.mark.parametrize("size", [1 << 20, 7, 1])
def test_a_request_that_offers_another_protocol_is_answered(port: int, sent: bytes, bodies: list[bytes], size: int):
    whole = sent + LAST
    if len(whole) > 10_000 and size < 100:
        size = 1000
    told = answered(port, [whole[i : i + size] for i in range(0, len(whole), size)])
    *answers, last = told.split(b"HTTP/1.1 200 OK\r\n")[1:]
    assert [answer.partition(b"\r\n\r\n")[2] for answer in answers] == bodies
    assert last.endswith(b"\r\n\r\nlast")


def test_a_client_that_waits_for_100_continue_gets_it(port: int):
    told = answered(port, [EXPECTING, LAST])
    assert told.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")
    assert b"\r\n\r\nabcde" in told
