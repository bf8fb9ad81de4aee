"""DrainingServer: a server that stops without losing a request."""

import asyncio
import socket
import time
from collections.abc import Sequence
from types import FrameType

import uvicorn

from kvloom.engine.thread import EngineThread
from kvloom.server.health import Health

_POLL_S = 0.05
_FAREWELL_S = 1.0  # for the last events of requests that were cut off


class DrainingServer(uvicorn.Server):
    """On the first signal new requests are refused and running ones finish; then, or after `grace_s`, it stops.

    A second signal stops at once.
    """

    def __init__(
        self, config: uvicorn.Config, health: Health, engines: Sequence[EngineThread], grace_s: float, greeting: str
    ) -> None:
        super().__init__(config)
        self._health, self._engines = health, engines
        self._grace_s, self._greeting = grace_s, greeting
        self._drain: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self._greeting, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by uvicorn on SIGTERM and SIGINT. Its own method would end the process by the signal, not with 0."""
        if self._health.is_draining:
            self.should_exit = self.force_exit = True
        else:
            self._begin(self._grace_s)

    async def stop(self, grace_s: float) -> None:
        """Begin to stop; returns when what ran has ended. The server exits soon after."""
        self._begin(grace_s)
        await self._wait_idle(grace_s + _FAREWELL_S)

    def _begin(self, grace_s: float) -> None:
        self._health.is_draining = True
        self._drain = asyncio.get_running_loop().create_task(self._stop_when_idle(grace_s))

    async def _stop_when_idle(self, grace_s: float) -> None:
        await self._wait_idle(grace_s)
        for engine in self._engines:  # what still runs ends with an error, which clients are told
            await asyncio.to_thread(engine.close)
        await self._wait_idle(_FAREWELL_S)
        self.should_exit = True

    async def _wait_idle(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while self._health.models.admission.num_active and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
