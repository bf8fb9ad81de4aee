"""Door: accepts callers while there is room for them. Others wait in the kernel's queue."""

import errno
import logging
import selectors
import socket
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

log = logging.getLogger(__name__)

BACKLOG = 1024  # length of the kernel's queue, at each address
_LOOK_S = 2.0  # seconds between two looks whether a listener's path is still there
_PAUSE_S = 0.1  # pause when out of descriptors or memory, unless a session ends before
_SHORT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


_LOSS_S, _PROBES = 60, 6  # seconds of silence after which a node is probed; unanswered probes that end a connection


def notice_loss(sock: socket.socket) -> None:
    """Have the system end a TCP connection whose other machine vanished without a word, within two minutes."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _LOSS_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _LOSS_S // _PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)


class Place:
    """What a caller takes of a door's room until it leaves it, or ends. Used by one thread."""

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave: Callable[[], None] | None = leave

    def leave(self) -> None:
        """The place is another caller's; may be called twice."""
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()


class Door:
    """`serve` runs on a thread of its own until `close`; the other methods may be called from any thread."""

    def __init__(self, max_sessions: int, begin: Callable[[socket.socket, Any], None]) -> None:
        """max_sessions: places at each listener. begin: takes over a caller's socket and address, and its `place`."""
        self.counts: Counter[str] = Counter()
        self._max_sessions = max_sessions
        self._begin = begin
        self._selector = selectors.DefaultSelector()
        self._listeners: dict[int, socket.socket] = {}  # by address family
        self._renewals: dict[int, Callable[[], socket.socket | None]] = {}  # likewise
        self._open: set[int] = set()
        self._num_inside: Counter[int] = Counter()
        self._is_short = False
        self._is_closing = False
        self._lock = threading.Lock()
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)

    def add(self, listener: socket.socket, renewed: Callable[[], socket.socket | None] = lambda: None) -> None:
        """Call before `serve`. The door closes the listener. renewed: gives another one where callers no longer reach
        this one.
        """
        listener.setblocking(False)
        self._listeners[listener.family] = listener
        self._renewals[listener.family] = renewed

    def serve(self) -> None:
        """Accepts callers."""
        while not self._is_closing:
            for family, renewed in self._renewals.items():
                if (fresh := renewed()) is not None:
                    self._replace(family, fresh)
            for family, listener in self._listeners.items():
                self._watch(family, listener, not self._is_short and self._num_inside[family] < self._max_sessions)
            events = self._selector.select(_PAUSE_S if self._is_short else _LOOK_S)
            self._is_short = False
            for key, _events in events:
                if key.fileobj is self._woken:
                    self._woken.recv(4096)
                elif isinstance(key.fileobj, socket.socket):
                    self._accept(key.fileobj)

    def _watch(self, family: int, listener: socket.socket, is_open: bool) -> None:
        if is_open and family not in self._open:
            self._selector.register(listener, selectors.EVENT_READ)
            self._open.add(family)
        elif not is_open and family in self._open:
            self._selector.unregister(listener)
            self._open.discard(family)
            self.counts["sessions_waited"] += 1

    def _replace(self, family: int, fresh: socket.socket) -> None:
        before = self._listeners[family]
        if family in self._open:
            self._selector.unregister(before)
            self._open.discard(family)
        before.close()
        fresh.setblocking(False)
        self._listeners[family] = fresh

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, address = listener.accept()
        except OSError as error:
            self._is_short = error.errno in _SHORT_OF
            if self._is_short:
                self.counts["accept_failures"] += 1
                if self.counts["accept_failures"] == 1:
                    log.error("callers wait: %s", error)
            return
        with self._lock:
            self._num_inside[sock.family] += 1
        try:
            self._begin(sock, address)
        except OSError:  # the caller has disconnected
            sock.close()
            self._left(sock.family)
        except RuntimeError as error:  # no thread available
            log.error("a caller is sent away: %s", error)
            sock.close()
            self._left(sock.family)

    def place(self, family: int) -> Place:
        """The place of a caller of that address family, who was begun."""
        return Place(partial(self._left, family))

    def _left(self, family: int) -> None:
        with self._lock:
            self._num_inside[family] -= 1
        self._ring()

    def num_inside(self, family: int) -> int:
        """Sessions at present."""
        return self._num_inside[family]

    def _ring(self) -> None:
        try:
            self._wake.send(b"x", socket.MSG_DONTWAIT)
        except OSError:
            return  # full or closed: it is awake, or has ended

    def stop(self) -> None:
        """Make `serve` return."""
        self._is_closing = True
        self._ring()

    def close(self) -> None:
        """Stops listening, after `serve` returned."""
        self._selector.close()
        for sock in (*self._listeners.values(), self._woken, self._wake):
            sock.close()
