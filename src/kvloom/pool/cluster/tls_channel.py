"""TlsChannel: a Channel inside TLS; and log lines, once each, about peers whose handshake fails."""

import logging
import socket
import ssl
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ems.common.channel import Channel, remaining_s
from ems.wire.frames import Frame, WireError

if TYPE_CHECKING:
    from kvloom.net.tls import MutualTls

logger = logging.getLogger(__name__)
T = TypeVar("T")

_MAX_COMPLAINTS = 1024  # remembered peers; the problem of one that was forgotten is logged again


class RevokedError(WireError):
    """The other side's certificate was revoked since the connection was begun."""


class TlsChannel(Channel):
    """As Channel, without descriptors. Decrypted bytes may wait inside TLS while the socket is empty, and each
    direction may need the other one: so each call is tried first, and then waits for what TLS asks for.
    """

    def __init__(self, files: "MutualTls", sock: socket.socket, is_server: bool) -> None:
        """Takes over a connected socket. Raises OSError when it has been disconnected."""
        self._files = files
        self._tls = files.wrap(sock, is_server)
        super().__init__(self._tls)
        self._tls.setblocking(False)
        self._certificate = b""

    def handshake(self, deadline_s: float) -> None:
        """Must come first. If the peer refuses our certificate, only the first `receive` reports it."""
        self._tried(deadline_s, self._tls.do_handshake)
        self._certificate = self._tls.getpeercert(binary_form=True) or b""

    @property
    def is_revoked(self) -> bool:
        """Whether the peer's certificate has been revoked. May be called from any thread."""
        return bool(self._certificate) and self._files.is_revoked(self._certificate)

    def refuse_revoked(self) -> None:
        """Raises RevokedError. Called once this connection is in the list that revocations are checked against: the
        files may have been read again since the handshake began.
        """
        if self.is_revoked:
            raise RevokedError("its certificate is refused, certificate revoked")

    def _tried(self, deadline_s: float | None, call: Callable[..., T], *arguments: Any) -> T:
        while True:
            try:
                return call(*arguments)
            except ssl.SSLWantReadError:
                self._wait(self._readable, deadline_s)
            except ssl.SSLWantWriteError:
                self._wait(self._writable, deadline_s)

    def has_frame(self) -> bool:
        return self._tls.pending() > 0 or super().has_frame()

    def send_bytes(self, data: memoryview, deadline_s: float | None) -> None:
        while len(data):
            remaining_s(deadline_s)
            data = data[self._tried(deadline_s, self._tls.write, data) :]

    def receive(self, deadline_s: float | None = None) -> Frame:
        while (frame := self._reader.next_frame()) is None:
            data = self._tried(deadline_s, self._tls.recv, self._reader.missing)
            if not data:
                raise ConnectionResetError("the other side closed the connection")
            self._reader.feed(data)
        return frame

    def receive_into(self, view: memoryview, deadline_s: float | None) -> None:
        position, size, read = 0, len(view), self._tls.read
        while position < size:  # a TLS record, 16 KiB, at a time, which takes fewer calls
            remaining_s(deadline_s)
            try:
                count = cast(int, read(size - position, view[position:]))
            except ssl.SSLWantReadError:
                self._wait(self._readable, deadline_s)
                continue
            except ssl.SSLWantWriteError:
                self._wait(self._writable, deadline_s)
                continue
            if not count:
                raise ConnectionResetError("the other side closed the connection")
            position += count


class Complaints:
    """Logs a warning for each problem of a peer, once. May be called from any thread."""

    def __init__(self) -> None:
        self._said: dict[str, str] = {}
        self._lock = threading.Lock()

    def warn(self, who: str, problem: str) -> None:
        """Log "who: problem", unless it was the last thing logged about them."""
        with self._lock:
            if self._said.get(who) == problem:
                return
            if len(self._said) >= _MAX_COMPLAINTS:
                self._said.clear()
            self._said[who] = problem
        logger.warning("%s: %s", who, problem)

    def forget(self, who: str) -> None:
        """They work again: the next problem is logged."""
        with self._lock:
            self._said.pop(who, None)


def problem_of(error: Exception, has_tls: bool) -> str:
    """A description of a failed handshake that is the same at every retry. has_tls: this side uses TLS."""
    text = str(error)
    if isinstance(error, RevokedError):
        return text
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused, {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        text = f"the TLS handshake failed, {(error.reason or 'broken').lower().replace('_', ' ')}"
        if "certificate" in text:
            return text
    return f"{text}; this node speaks {'TLS' if has_tls else 'plain text'}, does the other one too?"
