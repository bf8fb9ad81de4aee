"""Clients of HTTP/1.0 (ab, older proxies) do not know chunks: a body of unknown length ends with the connection."""

import socket
from collections.abc import AsyncIterator, Iterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tests.support.waiting import WAIT_S
from tests.support.wire.triton import serving

FRAMES = [b"data: 1\n\n", b"", b"data: 2\n\n", b"data: [DONE]\n\n"]


async def stream(request: Request) -> StreamingResponse:
    async def frames() -> AsyncIterator[bytes]:
        for frame in FRAMES:
            yield frame

    return StreamingResponse(frames())


async def whole(request: Request) -> Response:
    return Response(await request.body() or b"whole")


METHODS = ["GET", "HEAD", "POST"]
APP = Starlette(routes=[Route("/stream", stream, methods=METHODS), Route("/whole", whole, methods=METHODS)])


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving(APP) as port:
        yield port


def ask(port: int, head: str, body: bytes = b"") -> tuple[dict[str, str], bytes]:
    """Headers and body of the answer to one request, read until the connection closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as sock:
        sock.sendall(f"{head}\r\n\r\n".encode() + body)
        with sock.makefile("rb") as answer:
            told, _, body = answer.read().partition(b"\r\n\r\n")
    status, *lines = told.decode().split("\r\n")
    assert status == "HTTP/1.1 200 OK"
    return dict(line.split(": ", 1) for line in lines), body


@pytest.mark.parametrize("head", ["GET /stream HTTP/1.0", "GET /stream HTTP/1.0\r\nConnection: keep-alive"])
def test_a_stream_has_no_chunks_and_ends_with_the_connection(port: int, head: str):
    headers, body = ask(port, head)
    assert (body, headers["connection"]) == (b"".join(FRAMES), "close")
    assert "transfer-encoding" not in headers
    assert "content-length" not in headers


@pytest.mark.parametrize("head", ["GET /whole HTTP/1.0", "GET /whole HTTP/1.0\r\nConnection: keep-alive"])
def test_a_whole_answer_has_its_length(port: int, head: str):
    headers, body = ask(port, head)
    assert (body, headers["content-length"], headers["connection"]) == (b"whole", "5", "close")


@pytest.mark.parametrize("path", ["/stream", "/whole"])
def test_an_answer_to_head_is_its_head(port: int, path: str):
    headers, body = ask(port, f"HEAD {path} HTTP/1.0")
    assert body == b""
    assert "transfer-encoding" not in headers


def test_nobody_is_told_to_go_on(port: int):
    """RFC 9110, 10.1.1: a server ignores the expectation 100-continue in a request of HTTP/1.0."""
    head = "POST /whole HTTP/1.0\r\nContent-Length: 4\r\nExpect: 100-continue"
    assert ask(port, head, b"body")[1] == b"body"


def test_http_1_1_has_chunks(port: int):
    headers, body = ask(port, "GET /stream HTTP/1.1\r\nHost: x\r\nConnection: close")
    assert headers["transfer-encoding"] == "chunked"
    assert body == b"".join(b"%x\r\n%s\r\n" % (len(frame), frame) for frame in FRAMES if frame) + b"0\r\n\r\n"
