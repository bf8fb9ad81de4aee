"""LoopChannel: typed messages between two processes over a stream socket, where this one's end is on a loop."""

import asyncio
import contextlib
import socket
from typing import Any, Self

import msgspec

from kvloom.processes.frames import FrameBuffer, frame

_READ_BYTES = 1 << 16


class LoopChannel:
    """MessagePack messages in frames, as Channel has them."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, receives: Any) -> None:
        self._reader, self._writer = reader, writer
        self._encode = msgspec.msgpack.Encoder().encode
        self._received = FrameBuffer()
        self.expect(receives)

    @classmethod
    async def over(cls, sock: socket.socket, receives: Any) -> Self:
        """Over a connected socket, which the channel owns. `receives`: type of the messages that will arrive."""
        return cls(*await asyncio.open_connection(sock=sock), receives)

    def expect(self, receives: Any) -> None:
        """Change the type of the messages that will arrive."""
        self._decoder = msgspec.msgpack.Decoder(receives)

    def send(self, message: Any) -> None:
        """Never waits; messages to an end that is gone are lost."""
        if not self._writer.is_closing():
            self._writer.write(frame(self._encode(message)))

    async def receive(self, silence_s: float | None = None) -> Any:
        """The next message. Raises EOFError when there will be no more, TimeoutError when nothing comes for
        `silence_s`.
        """
        while not self._received.is_whole:
            try:
                data = await self._read(silence_s)
            except ConnectionError as error:
                raise EOFError(str(error)) from error
            if not data:
                raise EOFError("the other end closed the connection")
            self._received.feed(data)
        return self._decoder.decode(self._received.take())

    async def _read(self, silence_s: float | None) -> bytes:
        """The next bytes, waited for twice for half as long: the first wait is over at once where this process was
        halted, maybe together with the other.
        """
        if silence_s is None:
            return await self._reader.read(_READ_BYTES)
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(self._reader.read(_READ_BYTES), silence_s / 2)
        return await asyncio.wait_for(self._reader.read(_READ_BYTES), silence_s / 2)

    def close(self) -> None:
        """Close the socket behind what was sent; the other end reads the end of the stream."""
        self._writer.close()

    async def closed(self) -> None:
        """Close, and wait until all was sent."""
        self.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
