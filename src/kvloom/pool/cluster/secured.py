"""Connections inside TLS, as programs that may do without it know them, and log lines about peers that are refused.

tls_channel.py, which loads OpenSSL, is imported where a node is given certificates.
"""

import logging
import threading
from abc import abstractmethod

from ems.common.channel import Channel
from kvloom.pool.cluster.native.library import TlsEnds

logger = logging.getLogger(__name__)

_MAX_COMPLAINTS = 1024  # remembered peers; the problem of one that was forgotten is logged again


class TlsBroken(ConnectionError):
    """TLS refuses the peer, or what came from it."""


class CertificateRefused(TlsBroken):
    """The peer's certificate is not accepted, or was revoked since the connection was begun."""

    def __init__(self, why: str) -> None:
        super().__init__(f"its certificate is refused, {why}")


class SecuredChannel(Channel):
    """A Channel inside TLS."""

    ends: TlsEnds  # what C++ needs to send and receive inside it

    @abstractmethod
    def handshake(self, deadline_s: float) -> None:
        """Must come first. If the peer refuses our certificate, only the first `receive` reports it."""

    @property
    @abstractmethod
    def is_revoked(self) -> bool:
        """Whether the peer's certificate has been revoked, or its CA taken away. May be called from any thread."""

    def refuse_revoked(self) -> None:
        """Raises CertificateRefused. Called once this connection is in the list that revocations are checked against:
        the files may have been read again since the handshake began.
        """
        if self.is_revoked:
            raise CertificateRefused("certificate revoked, or its CA taken away")


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
    if isinstance(error, CertificateRefused):
        return str(error)
    text = f"the TLS handshake failed, {error}" if isinstance(error, TlsBroken) else str(error)
    if isinstance(error, TlsBroken) and "certificate" in text:
        return text
    return f"{text}; this node speaks {'TLS' if has_tls else 'plain text'}, does the other one too?"
