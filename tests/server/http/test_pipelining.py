"""Requests that are sent behind one whose answer still runs: a client that leaves cancels the answer that runs."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from tests.support.waiting import WAIT_S
from tests.support.wire.triton import serving

ENDED = threading.Event()


async def endless(request: Request) -> StreamingResponse:
    async def frames() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"data: x\n\n"
                await asyncio.sleep(0.001)
        finally:
            ENDED.set()

    return StreamingResponse(frames())


APP = Starlette(routes=[Route("/endless", endless)])
ONE = b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize("behind", [b"", ONE, 3 * ONE, ONE[:-2]], ids=["none", "one", "three", "half of one"])
def test_the_running_answer_is_cancelled_whatever_waits_behind_it(behind: bytes):
    ENDED.clear()
    with serving(APP) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as sock:
            sock.sendall(ONE + behind)
            assert sock.recv(4096)
        assert ENDED.wait(WAIT_S), "its generation goes on"
