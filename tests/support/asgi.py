"""ASGI apps on real sockets, in a thread of this process."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import uvicorn

from tests.support.waiting import until

LIMIT_S = 120.0


class PromptServer(uvicorn.Server):
    """A uvicorn server that stops at once when told to: uvicorn's own polls every 0.1 s and waits another 0.1 s."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    async def main_loop(self) -> None:
        self._waiting = asyncio.ensure_future(super().main_loop())
        with suppress(asyncio.CancelledError):
            await self._waiting

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Tasks that still run are cancelled when the loop ends."""
        for server in self.servers:
            server.close()
        for sock in sockets or []:
            sock.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await asyncio.sleep(0)

    def stop(self) -> None:
        """Called by another thread."""
        self.should_exit = self.force_exit = True
        self._loop.call_soon_threadsafe(lambda: self._waiting.cancel())


@contextmanager
def in_thread(server: PromptServer, listener: socket.socket) -> Iterator[None]:
    """Runs the server in a thread until the context ends."""
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]), daemon=True)
    thread.start()
    try:
        until(lambda: server.started or not thread.is_alive())
        assert server.started
        yield
    finally:
        if server.started:
            server.stop()
        thread.join(LIMIT_S)
