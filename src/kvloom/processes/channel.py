"""Channel: typed messages between two processes over a stream socket."""

import select
import socket
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from kvloom.processes.frames import HEAD, FrameBuffer, frame

_LONGEST_S = 86400.0  # what the system can be asked to wait


class HasFileno(Protocol):
    """A socket, or what has one."""

    def fileno(self) -> int: ...


Waited = TypeVar("Waited", bound=HasFileno)


def ready_of(waited: Sequence[Waited], timeout_s: float | None, events: int = select.POLLIN) -> list[Waited]:
    """Those at which one of `events` (or an error, or the end) is there within `timeout_s`, a day at most; None = wait
    for ever.

    Unlike select.select it takes descriptors from 1,024 on, which a server with many connections has.
    """
    poll = select.poll()
    for each in waited:
        poll.register(each, events)
    found = {number for number, _ in poll.poll(None if timeout_s is None else min(timeout_s, _LONGEST_S) * 1000)}
    return [each for each in waited if each.fileno() in found]


class FrameTooLong(Exception):
    """A frame is longer than its reader takes."""


def send_frames(sock: socket.socket, bodies: Iterable[bytes | bytearray | memoryview]) -> None:
    """Send large bodies without copying them. Waits for the reader. Raises OSError."""
    for body in bodies:
        sock.sendall(HEAD.pack(len(body)))
        sock.sendall(body)


def receive_frame(sock: socket.socket, max_bytes: int | None = None) -> bytes | None:
    """The body of the next frame, of which nothing but this is read; None at the end. Raises FrameTooLong, OSError."""
    head = _received(sock, HEAD.size)
    if head is None:
        return None
    (length,) = HEAD.unpack(head)
    if max_bytes is not None and length > max_bytes:
        raise FrameTooLong(f"{length} bytes")
    return _received(sock, length)


def _received(sock: socket.socket, length: int) -> bytes | None:
    data = bytearray(length)
    view = memoryview(data)
    while view:
        count = sock.recv_into(view)
        if not count:
            return None
        view = view[count:]
    return bytes(data)


class Channel:
    """MessagePack messages in frames over a connected stream socket, which the channel owns."""

    _READ_BYTES = 1 << 16

    def __init__(self, sock: socket.socket, receives: Any) -> None:
        """`receives`: type of the messages that will arrive, as msgspec takes it."""
        self._sock = sock
        self._encoder = msgspec.msgpack.Encoder()
        self.expect(receives)
        self._received = FrameBuffer()

    def expect(self, receives: Any) -> None:
        """Change the type of the messages that will arrive."""
        self._decoder = msgspec.msgpack.Decoder(receives)

    def fileno(self) -> int:
        """Of the socket, for `select`."""
        return self._sock.fileno()

    def send(self, message: Any, timeout_s: float | None = None) -> None:
        """Waits until the system has taken the whole message. Reads meanwhile, so that two ends that both send do not
        deadlock.

        Raises OSError when the other end is gone, TimeoutError when it does not read.
        """
        data = memoryview(frame(self._encoder.encode(message)))
        while data:
            try:
                data = data[self._sock.send(data, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                if not ready_of([self._sock], timeout_s, select.POLLIN | select.POLLOUT):
                    raise TimeoutError(f"nothing was read for {timeout_s:g} s") from None
                if ready_of([self._sock], 0.0):
                    self._fill_or_break()

    def receive(self, timeout_s: float | None = None) -> Any:
        """The next message. Raises EOFError when the other end is gone, TimeoutError when it is silent."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.has_message:
            if deadline is not None and not self.is_readable(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"no message within {timeout_s:g} s")
            self._fill()
        return self._decoder.decode(self._received.take())

    @property
    def has_message(self) -> bool:
        """Whether a whole message has been read: then `receive` returns at once, although the socket may be empty."""
        return self._received.is_whole

    def is_readable(self, timeout_s: float | None = 0.0) -> bool:
        """Whether bytes or the end of the stream arrive within `timeout_s`; None = wait for ever."""
        return self.has_message or bool(ready_of([self._sock], timeout_s))

    def close(self) -> None:
        """Close the socket; the other end reads the end of the stream."""
        self._sock.close()

    def _fill_or_break(self) -> None:
        try:
            self._fill()
        except EOFError as error:
            raise BrokenPipeError(str(error)) from error

    def _fill(self) -> None:
        try:
            received = self._sock.recv(self._READ_BYTES)
        except ConnectionError as error:
            raise EOFError(str(error)) from error
        if not received:
            raise EOFError("the other end closed the connection")
        self._received.feed(received)
