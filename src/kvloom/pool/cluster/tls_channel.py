"""TlsChannel: a Channel inside TLS. Encryption is apart from the socket, so C++ can do both for whole batches."""

import contextlib
import socket
from collections.abc import Callable
from typing import Any, TypeVar

from cryptography.x509 import Certificate
from OpenSSL import SSL

from ems.common.channel import remaining_s
from ems.wire.frames import Frame
from kvloom.net.mutual import MutualTls, ends_of, function_at, reason_in, refusal_of
from kvloom.pool.cluster.native.library import TLS_FUNCTIONS, TlsEnds
from kvloom.pool.cluster.secured import CertificateRefused, SecuredChannel, TlsBroken

T = TypeVar("T")

_RECORD_BYTES = 16 << 10  # most bytes of plain text that TLS takes or gives at a time
_AT_ONCE_BYTES = 256 << 10  # sent or received in one system call


class NodeTls(MutualTls):
    """Files of mutual TLS, and the channels that use them."""

    def channel(self, sock: socket.socket, is_server: bool) -> "TlsChannel":
        """Takes over a connected socket."""
        return TlsChannel(self, sock, is_server)


class TlsChannel(SecuredChannel):
    """As Channel, without descriptors. `sock` carries what `tls` encrypts in memory; bytes may wait there while the
    socket is empty, so each call asks TLS first, and waits for the socket when TLS lacks bytes.
    """

    def __init__(self, files: MutualTls, sock: socket.socket, is_server: bool) -> None:
        super().__init__(sock)
        self.tls = files.connection(is_server)
        self.ends = TlsEnds(*ends_of(self.tls), *map(function_at, TLS_FUNCTIONS))
        self._files = files
        self._chain: list[Certificate] = []  # of the peer, its own certificate first

    def handshake(self, deadline_s: float) -> None:
        try:
            self._done(deadline_s, self.tls.do_handshake)
        except TlsBroken as error:
            if why := refusal_of(self.tls):
                raise CertificateRefused(why) from error
            raise
        own = self.tls.get_peer_certificate(as_cryptography=True)
        sent = self.tls.get_peer_cert_chain(as_cryptography=True) or []  # with its own only on the calling side
        self._chain = [] if own is None else [own, *(each for each in sent if each != own)]

    @property
    def is_revoked(self) -> bool:
        return bool(self._chain) and self._files.is_revoked(self._chain)

    def _done(self, deadline_s: float | None, call: Callable[..., T], *arguments: Any) -> T:
        """The result of a call of `tls`, after what it needs was received; what it has for the peer is sent."""
        while True:
            try:
                result = call(*arguments)
            except SSL.WantReadError:
                self._flush(deadline_s)
                self._fill(deadline_s)
            except SSL.ZeroReturnError:
                raise ConnectionResetError("the other side closed the connection") from None
            except SSL.Error as error:
                with contextlib.suppress(OSError):
                    self._flush(deadline_s)  # the alert that tells the peer why
                raise TlsBroken(reason_in(error)) from error
            else:
                self._flush(deadline_s)
                return result

    def _flush(self, deadline_s: float | None) -> None:
        with contextlib.suppress(SSL.WantReadError):  # which says that nothing is left
            while True:
                super().send_bytes(memoryview(self.tls.bio_read(_AT_ONCE_BYTES)), deadline_s)

    def _fill(self, deadline_s: float | None) -> None:
        self._wait(self._readable, deadline_s)
        data = self.sock.recv(_AT_ONCE_BYTES)
        if not data:
            raise ConnectionResetError("the other side closed the connection")
        self.tls.bio_write(data)

    def has_frame(self) -> bool:
        with contextlib.suppress(SSL.Error):
            return bool(self.tls.recv(1, socket.MSG_PEEK))
        return super().has_frame()

    def send_bytes(self, data: memoryview, deadline_s: float | None) -> None:
        while len(data):
            remaining_s(deadline_s)
            data = data[self._done(deadline_s, self.tls.send, data[:_RECORD_BYTES]) :]

    def receive(self, deadline_s: float | None = None) -> Frame:
        while (frame := self._reader.next_frame()) is None:
            self._reader.feed(self._done(deadline_s, self.tls.recv, self._reader.missing))
        return frame

    def receive_into(self, view: memoryview, deadline_s: float | None) -> None:
        while len(view):
            remaining_s(deadline_s)
            view = view[self._done(deadline_s, self.tls.recv_into, view[:_RECORD_BYTES]) :]
