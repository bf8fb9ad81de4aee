"""One client's socket on the daemon's loop: frames and passed descriptors in, frames out."""

import asyncio
import os
import socket
import struct
from collections import deque
from collections.abc import Callable

from kvloom.gewu.frames import Frame, FrameDecoder, FrameError, encode

_READ_BYTES = 1 << 16
_MAX_UNSENT_BYTES = 64 << 20  # a client that does not read this much is cut off
_MAX_FDS = 16


class Connection:
    """Calls `on_frame` for each frame, in order, and `on_end` once. Owns the socket."""

    def __init__(
        self,
        sock: socket.socket,
        on_frame: Callable[["Connection", Frame], None],
        on_end: Callable[["Connection"], None],
    ) -> None:
        self.pid, self.uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        self.id = 0  # given by the daemon
        self._sock = sock
        self._on_frame = on_frame
        self._on_end = on_end
        self._decoder = FrameDecoder()
        self._fds: deque[int] = deque()  # received, not taken
        self._unsent = bytearray()
        self._loop = asyncio.get_running_loop()
        self._is_open = True
        sock.setblocking(False)
        self._loop.add_reader(sock, self._read)

    def take_fd(self) -> int | None:
        """The oldest descriptor that came in; the caller closes it."""
        return self._fds.popleft() if self._fds else None

    def send(self, frame: Frame) -> None:
        """Send at once, or when the client reads again. A client that never does is cut off."""
        if not self._is_open:
            return
        data = encode(frame)
        if not self._unsent:
            try:
                data = data[self._sock.send(data) :]
            except BlockingIOError:
                pass
            except OSError:
                self.close()
                return
            if data:
                self._loop.add_writer(self._sock, self._write)
        self._unsent += data
        if len(self._unsent) > _MAX_UNSENT_BYTES:
            self.close()

    def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        while self._fds:
            os.close(self._fds.popleft())
        self._on_end(self)

    def _read(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._sock, _READ_BYTES, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        self._fds.extend(fds)
        if not data or len(self._fds) > _MAX_FDS:
            self.close()
            return
        self._decoder.feed(data)
        try:
            while self._is_open and (frame := self._decoder.next_frame()) is not None:
                self._on_frame(self, frame)
        except FrameError:
            self.close()

    def _write(self) -> None:
        try:
            del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        if not self._unsent:
            self._loop.remove_writer(self._sock)
