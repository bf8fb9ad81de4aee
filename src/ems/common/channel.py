"""Channel: a connected stream socket that carries frames, descriptors and raw block bytes, each with a deadline."""

import array
import contextlib
import select
import socket
import time

from ems.wire.frames import Frame, FrameReader, FrameWriter, WireError
from ems.wire.messages import Message

_FD = array.array("i")
_READ_AHEAD_BYTES = 1 << 16


def remaining_s(deadline_s: float | None) -> float | None:
    """Seconds until a `time.monotonic()` deadline. Raises TimeoutError when it has passed; None waits for ever."""
    if deadline_s is None:
        return None
    left = deadline_s - time.monotonic()
    if left <= 0:
        raise TimeoutError("deadline passed")
    return left


def remaining_ms(deadline_s: float) -> int:
    """Whole milliseconds until the deadline, 0 when it has passed, within the wire's field."""
    return min(2**32 - 1, max(0, int((deadline_s - time.monotonic()) * 1000)))


class Channel:
    """One end of a connection. Used by one thread at a time. After any error it must be closed, because its position in
    the stream is unknown.

    On Unix sockets no raw bytes follow a frame, so several frames are read at once. The socket stays in blocking mode
    and waits are polls: changing its timeout before each call would cost a system call each, and a thread
    that sleeps in `recv` on a Unix socket is also woken whenever the other end reads what it was sent.

    Every method raises TimeoutError, ConnectionError (OSError) or WireError.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self.sock = sock
        self._ahead = _READ_AHEAD_BYTES if sock.family == socket.AF_UNIX else 0
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable.register(sock, select.POLLOUT)
        self._reader = FrameReader()
        self._writer = FrameWriter()
        self._held = bytearray()

    @property
    def num_received(self) -> int:
        """Frames that came so far."""
        return self._reader.num_frames

    def use_key(self, sending: bytes, receiving: bytes) -> None:
        """Tag every later frame: `sending` is the key of our frames, `receiving` of the peer's."""
        self._writer.use_key(sending)
        self._reader.use_key(receiving)

    def send(
        self,
        message: Message,
        deadline_s: float | None = None,
        *,
        request_id: int = 0,
        deadline_ms: int = 0,
        fd: int | None = None,
    ) -> None:
        """Sends one frame, with a file descriptor if one is given."""
        frame = self._writer.encode(message, request_id, deadline_ms)
        data = memoryview(bytes(self._held) + frame if self._held else frame)
        self._held.clear()
        if fd is not None:
            self._wait(self._writable, deadline_s)
            data = data[socket.send_fds(self.sock, [data], [fd], socket.MSG_DONTWAIT) :]
        self.send_bytes(data, deadline_s)

    def hold(self, message: Message, request_id: int) -> None:
        """As `send`, but the frame is sent with the next one, so that several answers wake their reader once."""
        self._held += self._writer.encode(message, request_id)

    def feed(self, data: bytes) -> None:
        """Bytes for `receive` that another reader of this socket has read."""
        self._reader.feed(data)

    def take_received(self) -> bytes:
        """Bytes that were read and not used yet, for another reader of this socket."""
        return self._reader.take()

    def has_frame(self) -> bool:
        """Whether `receive` would return at once."""
        return self._reader.missing == 0 or bool(self._readable.poll(0))

    def send_bytes(self, data: memoryview, deadline_s: float | None) -> None:
        """Sends raw block bytes."""
        while len(data):
            remaining_s(deadline_s)
            try:
                data = data[self.sock.send(data, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                self._wait(self._writable, deadline_s)

    @staticmethod
    def _wait(poll: select.poll, deadline_s: float | None) -> None:
        left_s = remaining_s(deadline_s)
        if not poll.poll(None if left_s is None else left_s * 1000):
            raise TimeoutError("deadline passed")

    def receive(self, deadline_s: float | None = None) -> Frame:
        """The next frame."""
        while (frame := self._reader.next_frame()) is None:
            if deadline_s is not None or self._ahead:
                self._wait(self._readable, deadline_s)
            data = self.sock.recv(max(self._ahead, self._reader.missing))
            if not data:
                raise ConnectionResetError("the other side closed the connection")
            self._reader.feed(data)
        return frame

    def receive_with_fd(self, deadline_s: float | None = None) -> tuple[Frame, int]:
        """The next frame and the descriptor that came with it, close-on-exec; -1 when there was none."""
        fd = -1
        try:
            while (frame := self._reader.next_frame()) is None:
                self._wait(self._readable, deadline_s)
                size, room = max(self._ahead, self._reader.missing), socket.CMSG_LEN(_FD.itemsize)
                data, ancillary, _flags, _address = self.sock.recvmsg(size, room, socket.MSG_CMSG_CLOEXEC)
                if not data:
                    raise ConnectionResetError("the other side closed the connection")
                for level, kind, payload in ancillary:
                    if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS and len(payload) == _FD.itemsize:
                        fd = array.array("i", payload)[0]
                self._reader.feed(data)
        except BaseException:
            if fd >= 0:
                socket.close(fd)
            raise
        return frame, fd

    def receive_into(self, view: memoryview, deadline_s: float | None) -> None:
        """Fills `view` with raw block bytes."""
        position = 0
        while position < len(view):
            remaining_s(deadline_s)
            try:
                count = self.sock.recv_into(view[position:], 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._wait(self._readable, deadline_s)
                continue
            if count == 0:
                raise ConnectionResetError("the other side closed the connection")
            position += count

    def abort(self) -> None:
        """End the connection under another thread's call, which then fails; that thread closes it."""
        with contextlib.suppress(OSError):
            # SSLSocket's own shutdown would let that thread continue in plain text
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)

    def close(self) -> None:
        self.sock.close()


CHANNEL_ERRORS = (OSError, WireError)
"""What a broken, late or hostile connection raises (TimeoutError and ConnectionError are OSErrors)."""
