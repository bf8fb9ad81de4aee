"""DrainingServer: answers while models load, and stops without losing a request."""

import asyncio
import math
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from types import FrameType

import uvicorn

from kvloom.server.http.slow import GuardedProtocol
from kvloom.server.serving.engine import Closing
from kvloom.server.serving.health import Health

_POLL_S = 0.05
_FAREWELL_S = 1.0  # seconds for the last events of requests that were cut off


class DrainingServer(uvicorn.Server):
    """Awaits `load` while the sockets are already served, then prints what it returns. When `load` fails the server
    ends.

    On the first signal new requests are refused and running ones finish; then, or after `grace_s`, it stops. A second
    signal ends the running requests with an error; a third one waits for nothing.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        health: Health,
        engines: Sequence[Closing],
        grace_s: float,
        load: Callable[[], Awaitable[str]],
    ) -> None:
        """`engines`: those loaded so far; grows while loading."""
        super().__init__(config)
        self._health, self._engines = health, engines
        self._grace_s, self._load = grace_s, load
        self._grace_ends_s = math.inf  # time.monotonic
        self._loading: asyncio.Task[None] | None = None
        self._drain: asyncio.Task[None] | None = None
        self._failure: Exception | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loading = asyncio.get_running_loop().create_task(self._finish_loading())

    def check(self) -> None:
        """Raises the error that ended loading."""
        if self._failure is not None:
            raise self._failure

    async def _finish_loading(self) -> None:
        try:
            greeting = await self._load()
            if not self._health.is_draining:
                print(greeting, flush=True)
        except Exception as error:  # `check` raises it
            self._failure, self.should_exit = error, True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by uvicorn on SIGTERM and SIGINT, instead of its own method, after which the process would not exit
        with 0.
        """
        if not self._health.is_draining:
            self._begin(self._grace_s)
        elif time.monotonic() < self._grace_ends_s:
            self._grace_ends_s = time.monotonic()
        else:
            self.should_exit = self.force_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends connections whose client reads nothing instead of waiting for them, because an answer that uvicorn cuts
        off logs a traceback. For the same reason the app is told to shut down even after a third signal.
        """
        for connection in list(self.server_state.connections):
            if isinstance(connection, GuardedProtocol):
                connection.end_if_stalled()
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()

    async def stop(self, grace_s: float) -> None:
        """Stop, and return when running requests have ended. The server exits soon after."""
        self._begin(grace_s)
        await self._wait_idle(_FAREWELL_S)

    def _begin(self, grace_s: float) -> None:
        self._health.is_draining = True
        self._grace_ends_s = time.monotonic() + grace_s
        if self._loading is not None:
            self._loading.cancel()
        self._drain = asyncio.get_running_loop().create_task(self._stop_when_idle())

    async def _stop_when_idle(self) -> None:
        await self._wait_idle()
        for engine in self._engines:  # requests still running end with an error for their clients
            await asyncio.to_thread(engine.close)
        self._grace_ends_s = time.monotonic()  # the last events get their time from now on
        await self._wait_idle(_FAREWELL_S)
        self.should_exit = True

    async def _wait_idle(self, more_s: float = 0.0) -> None:
        """Wait until nothing runs, or `more_s` after the grace period."""
        while self._health.models.num_active and time.monotonic() < self._grace_ends_s + more_s:
            await asyncio.sleep(_POLL_S)
