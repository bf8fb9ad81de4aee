"""vLLM's process: takes requests and returns tokens until its socket closes.

`python -m kvloom.vllm.main SOCKET LEVEL`: the number of an open socket, and the log level.
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import traceback
from typing import Any

import msgspec
import uvloop

from kvloom.contract.errors import ServingError
from kvloom.contract.frames import FrameBuffer, frame
from kvloom.contract.hosted import HostOrder, HostReport, HostSetup
from kvloom.contract.messages import Failed, Ready
from kvloom.engine.link import ranklog
from kvloom.processes import inside
from kvloom.vllm.arguments import arguments_of

_READ_BYTES = 1 << 16
# defaults of the environment: nothing is downloaded or reported to others, and vLLM logs at the server's level
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_DO_NOT_TRACK": "1"}
_LEVELS = ((logging.DEBUG, "DEBUG"), (logging.INFO, "INFO"), (logging.WARNING, "WARNING"))


class Line:
    """The connection to the server: messages over a socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock, self._received = sock, FrameBuffer()
        self._encoder = msgspec.msgpack.Encoder()
        self._unsent = bytearray()
        self.is_closed = False

    async def receive(self, decoder: Any) -> Any:
        """The next message. Raises EOFError when the server is gone."""
        while not self._received.is_whole:
            try:
                data = await asyncio.get_running_loop().sock_recv(self._sock, _READ_BYTES)
            except ConnectionError:
                data = b""
            if not data:
                raise EOFError("the server is gone")
            self._received.feed(data)
        return decoder.decode(self._received.take())

    def send(self, report: HostReport) -> None:
        """Send a report, on the loop; what the system does not accept at once is sent later."""
        self._unsent += frame(self._encoder.encode(report))
        self._flush()

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._unsent:
                del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            loop.add_writer(self._sock, self._flush)
            return
        except OSError:  # the server is gone; the reader notices
            self._unsent.clear()
        loop.remove_writer(self._sock)

    async def drain(self) -> None:
        """Wait until everything is sent."""
        while self._unsent:
            await asyncio.sleep(0.01)


async def serve(sock: socket.socket) -> None:
    """Load the model, and answer until the server closes the socket, which raises EOFError."""
    line = Line(sock)
    setup: HostSetup = await line.receive(msgspec.msgpack.Decoder(HostSetup))
    try:
        from kvloom.vllm.desk import open_desk  # noqa: PLC0415 -- vLLM reads the environment, which is set by now

        desk = await open_desk(setup, arguments_of(setup.config), line.send)
    except ServingError as error:
        line.send(Failed(str(error)))
        await line.drain()
        return
    except Exception as error:  # whatever it is, the server is told before this process ends
        traceback.print_exc()
        line.send(Failed(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"))
        await line.drain()
        return
    gc.collect()
    gc.freeze()  # the model's objects are permanent: collections skip them
    line.send(Ready(desk.info))
    orders = msgspec.msgpack.Decoder(HostOrder)
    receiving = asyncio.ensure_future(_receive_all(line, orders, desk))
    failed = asyncio.ensure_future(desk.failed)
    await asyncio.wait((receiving, failed), return_when=asyncio.FIRST_COMPLETED)
    if failed.done():
        line.send(Failed(failed.result()))
        await line.drain()


async def _receive_all(line: Line, orders: Any, desk: Any) -> None:
    with contextlib.suppress(EOFError):
        while True:
            desk.take(await line.receive(orders))


def main() -> None:
    number, level = int(sys.argv[1]), int(sys.argv[2])
    os.dup2(2, 1)  # vLLM writes its log to standard output
    ranklog.begin(level)
    named = next((name for at, name in _LEVELS if level <= at), "ERROR")
    for name, value in {**_ENVIRONMENT, "VLLM_LOGGING_LEVEL": named}.items():
        os.environ.setdefault(name, value)
    inside.begin()
    sock = socket.socket(fileno=number)
    sock.set_inheritable(False)
    os.register_at_fork(after_in_child=lambda: os.close(number))  # else the server would not notice this process's end
    try:
        uvloop.run(serve(sock))  # as vLLM's own server does
    except EOFError:
        pass
    finally:
        os.killpg(0, signal.SIGKILL)  # vLLM's child processes end too


if __name__ == "__main__":
    main()
