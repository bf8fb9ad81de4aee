"""Protection against clients that are slow on purpose.

Limits the time for the head of a request, and for an answer that the client does not read, in the protocol; and the
time for a request's body, in ASGI.
"""

import asyncio
import logging
import struct
from fcntl import ioctl
from termios import TIOCOUTQ
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from kvloom.contract.errors import Unavailable
from kvloom.server.errors import BodyTooSlow
from kvloom.server.http.versions import DecliningParser, without_chunks

logger = logging.getLogger(__name__)

HEAD_TIMEOUT_S = 20.0
BODY_TIMEOUT_S = 60.0
STALL_TIMEOUT_S = 60.0
MAX_HEAD_BYTES = 64 * 1024


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's `http=`. Closes a connection whose request head is not complete in time, or too long.

    The time starts with the connection, and with the first byte of each later request; it stops while nothing is read
    because earlier answers run. Idle time between requests is limited by uvicorn's `timeout_keep_alive`. A connection
    whose client reads nothing of a pending answer is closed too. HTTP/1.0 requests are answered without chunks, and
    those that offer another protocol as if they did not.
    """

    head_timeout_s = HEAD_TIMEOUT_S
    stall_timeout_s = STALL_TIMEOUT_S
    parser: DecliningParser
    _deadline: asyncio.TimerHandle | None = None
    _stalling: asyncio.TimerHandle | None = None  # while the answer is written faster than it is read
    _num_head_bytes = 0
    _is_between = True  # between two requests, or before the first: the next byte begins a head
    _num_begun = 0  # heads in the bytes that are being read
    _answering: RequestResponseCycle | None = None  # the request whose answer runs, or was the last to run

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.parser = DecliningParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start()

    def connection_lost(self, exc: Exception | None) -> None:
        """uvicorn tells only the last request of the disconnect: others may wait behind the one whose answer runs."""
        self._stop()
        self._unwatch()
        super().connection_lost(exc)
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch(self._num_untaken())

    def resume_writing(self) -> None:
        self._unwatch()
        super().resume_writing()

    def end_if_stalled(self) -> None:
        """At the end of the server: close the connection if its client does not keep up with its answer."""
        if self._stalling is not None:
            self._unwatch()
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        was_between, self._num_begun = self._is_between, 0
        super().data_received(data)
        if self._deadline is None:
            return
        if self._num_begun <= int(was_between):  # otherwise these bytes include the end of an earlier request
            self._num_head_bytes += len(data)
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._end("too long")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_begun += 1
        self._is_between = False
        if self._deadline is None:
            self._start()

    def on_message_complete(self) -> None:
        if self.parser.is_offered:
            return
        super().on_message_complete()
        self._is_between = True

    def on_headers_complete(self) -> None:
        if self.parser.is_offered:
            return
        self._stop()
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        is_old = cycle.scope["http_version"] < "1.1"
        super()._start_asgi_task(cycle, without_chunks(app, cycle) if is_old else app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._deadline is not None and not self.flow.read_paused:
            self._deadline.cancel()
            self._wait()

    def _start(self) -> None:
        self._num_head_bytes = 0
        self._wait()

    def _wait(self) -> None:
        self._deadline = self.loop.call_later(self.head_timeout_s, self._be_late)

    def _be_late(self) -> None:
        if self.flow.read_paused:
            self._wait()
        else:
            self._end("too slow")

    def _stop(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _watch(self, num_untaken: int) -> None:
        """Look again later; `num_untaken` is the number now."""
        self._stalling = self.loop.call_later(self.stall_timeout_s, self._look, num_untaken)

    def _unwatch(self) -> None:
        if self._stalling is not None:
            self._stalling.cancel()
            self._stalling = None

    def _look(self, num_before: int) -> None:
        """Nothing is written meanwhile, so the number shrinks unless the client reads nothing."""
        num_untaken = self._num_untaken()
        if num_untaken < num_before:
            self._watch(num_untaken)
            return
        logger.warning("connection closed: nothing of its answer was taken for %g s", self.stall_timeout_s)
        self.end_if_stalled()

    def _num_untaken(self) -> int:
        """Bytes, here and in the kernel, that the client has not acknowledged."""
        sock = self.transport.get_extra_info("socket")
        (in_kernel,) = struct.unpack("i", ioctl(sock.fileno(), TIOCOUTQ, b"\0" * 4))
        return int(self.transport.get_write_buffer_size()) + int(in_kernel)

    def _end(self, why: str) -> None:
        logger.warning("connection closed: the head of its request is %s", why)
        self._stop()
        self.transport.abort()


class BodyTimeoutMiddleware:
    """ASGI: `receive` raises BodyTooSlow when a request's body is not complete after `limit_s` seconds, and Unavailable
    when it is not as the server ends.
    """

    def __init__(self, app: ASGIApp, limit_s: float = BODY_TIMEOUT_S) -> None:
        self._app = app
        self._limit_s = limit_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        end_s = asyncio.get_running_loop().time() + self._limit_s
        is_whole = False

        async def timed() -> Message:
            nonlocal is_whole
            if is_whole:
                return await receive()
            try:
                async with asyncio.timeout_at(end_s):
                    message = await receive()
            except TimeoutError:
                logger.warning("request given up: its body is too slow")
                raise BodyTooSlow(f"the request body did not arrive in {self._limit_s:g} s") from None
            except asyncio.CancelledError:  # by uvicorn, a second after the server was told to stop
                raise Unavailable("the server is stopping") from None
            is_whole = message["type"] != "http.request" or not message.get("more_body", False)
            return message

        await self._app(scope, timed, send)
