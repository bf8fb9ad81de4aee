"""One client's socket on the daemon's loop: a hello, then frames and passed descriptors in, frames out."""

import asyncio
import logging
import os
import socket
import struct
from collections import deque
from collections.abc import Callable

from kvloom.gewu.codes import Code, Refused
from kvloom.gewu.descriptors import is_spare
from kvloom.gewu.protocol.frames import PROTOCOL, Frame, FrameDecoder, FrameError, encode
from kvloom.gewu.service.frame_budget import FrameBudgets

log = logging.getLogger(__name__)

_READ_BYTES = 1 << 16
_FRAME_S = 10.0  # seconds in which a frame that has begun must be complete
_MAX_FDS = 16
_LOST_FD = -1  # stands for a descriptor that arrived while this process had no free ones
_CALLS_OF_PROTOCOL_1 = frozenset("CSDQ")


class Connection:
    """Calls `on_frame` for each frame after the hello, in order, and `on_end` once. Owns the socket.

    A client with another protocol gets an error and one log line; none of its frames reaches `on_frame`.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_frame: Callable[["Connection", Frame], None],
        on_end: Callable[["Connection"], None],
        budgets: FrameBudgets,
        frame_s: float = _FRAME_S,
    ) -> None:
        """A client whose frame is not complete `frame_s` after its beginning is disconnected."""
        self.pid, self.uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        self.id = 0  # assigned by the daemon
        self._sock = sock
        self._on_frame = on_frame
        self._on_end = on_end
        self._decoder = FrameDecoder()
        self._fds: deque[int] = deque()  # descriptors received and not taken
        self._unsent = bytearray()
        self._budgets = budgets
        self._frame_s = frame_s
        self._deadline: asyncio.TimerHandle | None = None  # timeout of the frame that has begun
        self._has_room = False  # whether there is memory for it
        self._loop = asyncio.get_running_loop()
        self.is_open = True
        self._is_greeted = False
        self._is_refused = False
        sock.setblocking(False)
        self._loop.add_reader(sock, self._read)

    def take_fd(self) -> int | None:
        """The oldest descriptor received; the caller closes it. Raises Refused when it arrived while none were free."""
        fd = self._fds.popleft() if self._fds else None
        if fd == _LOST_FD:
            raise Refused(Code.NOMEM, "the service is out of descriptors")
        return fd

    def send(self, frame: Frame) -> None:
        """Send at once, or when the client reads again. A client that never reads is disconnected."""
        if not self.is_open:
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
        largest = self._budgets.unsent.set(self, len(self._unsent))
        if isinstance(largest, Connection):
            log.warning("cut off process %d, which reads none of its replies", largest.pid)
            largest.close()

    def close(self) -> None:
        if not self.is_open:
            return
        self.is_open = False
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        self._end_frame()
        self._budgets.unsent.leave(self)
        for fd in self._fds:
            if fd != _LOST_FD:
                os.close(fd)
        self._fds.clear()
        self._on_end(self)

    def _read(self) -> None:
        try:
            data, fds, flags, _ = socket.recv_fds(self._sock, _READ_BYTES, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        self._fds.extend(map(_kept, fds))
        if flags & socket.MSG_CTRUNC:  # a client sends one a Create: a later one's must not be taken for the lost one
            self._fds.append(_LOST_FD)
        if not data or len(self._fds) > _MAX_FDS:
            self.close()
            return
        self._decoder.feed(data)
        try:
            while self.is_open and (frame := self._decoder.next_frame()) is not None:
                self._end_frame()
                if self._is_greeted:
                    self._on_frame(self, frame)
                else:
                    self._greet(frame)
        except FrameError:
            self.close()
        if self.is_open and self._decoder.is_inside:
            self._await_rest()

    def _await_rest(self) -> None:
        """A frame has begun. A long one is left unread until there is memory for it."""
        length = self._decoder.length
        if length > _READ_BYTES and not self._has_room:
            self._has_room = self._budgets.unread.take(self, length, self._resume)
            if not self._has_room:
                self._loop.remove_reader(self._sock)
                self._stop_clock()
                return
        if self._deadline is None:
            self._deadline = self._loop.call_later(self._frame_s, self._give_up)

    def _resume(self) -> None:
        self._has_room = True
        self._loop.add_reader(self._sock, self._read)
        self._deadline = self._loop.call_later(self._frame_s, self._give_up)

    def _give_up(self) -> None:
        log.warning("cut off process %d, which sent half a frame and no more for %g s", self.pid, self._frame_s)
        self.close()

    def _end_frame(self) -> None:
        """The frame is complete, or never will be: free its timer and memory."""
        self._has_room = False
        self._stop_clock()
        self._budgets.unread.leave(self)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _greet(self, frame: Frame) -> None:
        """Answer a hello. Raises FrameError for anything but a hello or a call of protocol 1, which had none."""
        is_hello = frame.op == "H"
        if is_hello and frame.a == PROTOCOL:
            self._is_greeted = True
            self.send(Frame("H", PROTOCOL))
            return
        if not is_hello and frame.op not in _CALLS_OF_PROTOCOL_1:
            raise FrameError("there was no hello")
        spoken = frame.a if is_hello else 1
        why = f"its library speaks Gewu's protocol {spoken}, this service {PROTOCOL}: update the older one"
        if not self._is_refused:
            log.warning("refused process %d: %s", self.pid, why)
        self._is_refused = True
        if is_hello:
            self.send(Frame("H", PROTOCOL))
            self.close()
        else:
            self.send(Frame("r", frame.a, Code.NOSYS, payload=why.encode()))

    def _write(self) -> None:
        try:
            del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        self._budgets.unsent.set(self, len(self._unsent))
        if not self._unsent:
            self._loop.remove_writer(self._sock)


def _kept(fd: int) -> int:
    """A descriptor that a client has passed, unless it is one of this process's last."""
    if not is_spare(fd):
        return fd
    os.close(fd)
    return _LOST_FD
