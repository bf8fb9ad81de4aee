"""PeerLine: one connection to another node, for one call at a time; made anew when it breaks."""

import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ems.common.breaker import Breaker
from ems.common.channel import CHANNEL_ERRORS, Channel, remaining_ms, remaining_s
from ems.keys import NONCE_BYTES, derive, proof, same
from ems.wire import messages as m
from ems.wire.frames import WireError
from ems.wire.messages import Cause
from kvloom.net.listening import bracketed
from kvloom.pool.cluster.resolving import Lookup, UnknownName
from kvloom.pool.cluster.tls_channel import Complaints, TlsChannel, problem_of
from kvloom.pool.config import Address

if TYPE_CHECKING:
    from kvloom.net.tls import MutualTls

_CONNECT_S = 1.0
_MAX_REASON = 300  # characters of why we are refused, in the log
_PATIENCE_S = 0.5  # a call that waited this long for others, while none of them was answered, is a failure of the peer


def session_keys(secret: bytes, client_nonce: bytes, agent_nonce: bytes) -> tuple[bytes, bytes]:
    """Keys of the frames from the calling node and from the called one, for this pair of nonces."""
    name = (client_nonce + agent_nonce).hex()
    return derive(secret, "peer frames of caller", name), derive(secret, "peer frames of called", name)


def ask(channel: Channel, message: m.Message, deadline_s: float) -> m.Message:
    """One message and its answer."""
    channel.send(message, deadline_s, deadline_ms=remaining_ms(deadline_s))
    return channel.receive(deadline_s).message


@dataclass(frozen=True, slots=True)
class Own:
    """This node as it shows itself to others. tls: how connections are encrypted; None = not.

    num_lines: connections to each other node that a load may use at once. max_block_bytes: of the largest block that
    this node takes.
    """

    node_id: str
    secret: bytes
    tls: "MutualTls | None" = None
    num_lines: int = 1
    max_block_bytes: int = 0


class PeerLine:
    """Any thread may call. Nothing here raises for what happens on the other machine or in between."""

    def __init__(self, address: Address, own: Own, breaker: Breaker, complaints: Complaints) -> None:
        """breaker, complaints: of the peer, which may have more lines."""
        self._own_id = own.node_id
        self._own_max_bytes = own.max_block_bytes
        self.max_block_bytes = 0  # of the largest block that the peer takes; 0 = it has not said so yet
        self._address = address
        self._secret = own.secret
        self._tls = own.tls
        self._breaker = breaker
        self._complaints = complaints
        self._name = f"peer {address.id} at {bracketed(address.host)}:{address.port}"
        self._lookup = Lookup(address.host, address.port)
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._answered_s = 0.0
        self.num_waiting = 0  # calls whose turn it is not yet, about

    def call(self, deadline_s: float, call: Callable[[Channel], Cause]) -> Cause:
        """Runs `call(channel)` when it is its turn and the breaker allows it. Returns what it does, or what went wrong.

        It may run twice: a connection that broke since it was last used is made anew.
        """
        start_s = time.monotonic()
        if start_s >= deadline_s:
            return Cause.TIMEOUT  # no fault of the peer
        if not self._lock.acquire(blocking=False) and not self._wait(deadline_s - start_s):
            now_s = time.monotonic()
            if self._answered_s < start_s <= now_s - _PATIENCE_S:
                self._breaker.fail(now_s)
            return Cause.TIMEOUT
        try:
            if not self._breaker.allows(time.monotonic()):
                return Cause.PEER_DOWN
            failures = self._breaker.failures
            try:
                result = self._try(call, deadline_s)
            except CHANNEL_ERRORS as error:
                if self._breaker.failures == failures:  # else another line met the same
                    self._breaker.fail(time.monotonic())
                return Cause.TIMEOUT if isinstance(error, TimeoutError) else Cause.PEER_DOWN
            self._answered_s = time.monotonic()
            self._breaker.succeed()
            return result
        finally:
            self._lock.release()

    def _wait(self, timeout_s: float) -> bool:
        """For the lock; whether it is held."""
        self.num_waiting += 1
        try:
            return self._lock.acquire(timeout=timeout_s)
        finally:
            self.num_waiting -= 1

    def _try(self, call: Callable[[Channel], Cause], deadline_s: float) -> Cause:
        """On the connection there is, then on a new one. Raises as the channel does."""
        if self._channel is not None:
            try:
                return call(self._channel)
            except CHANNEL_ERRORS as error:
                self._hang_up()
                if isinstance(error, TimeoutError):
                    raise
        try:
            self._channel = self._connect(deadline_s)
            if isinstance(self._channel, TlsChannel):
                self._channel.refuse_revoked()
        except CHANNEL_ERRORS as error:
            self._complain(error)
            self._hang_up()
            raise
        try:
            return call(self._channel)
        except CHANNEL_ERRORS:
            self._hang_up()
            raise

    def _connect(self, deadline_s: float) -> Channel:
        deadline_s = min(deadline_s, time.monotonic() + _CONNECT_S)
        sock = self._dialled(deadline_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel = Channel(sock) if self._tls is None else TlsChannel(self._tls, sock, is_server=False)
        try:
            if isinstance(channel, TlsChannel):
                channel.handshake(deadline_s)
            nonce = secrets.token_bytes(NONCE_BYTES)
            challenge = ask(channel, m.Hello(self._own_id, nonce, is_peer=True), deadline_s)
            if not isinstance(challenge, m.Challenge):
                raise WireError("expected a challenge")
            claim = proof(self._secret, "peer caller", self._own_id, nonce, challenge.nonce)
            welcome = ask(channel, m.Proof(claim), deadline_s)
            if isinstance(welcome, m.Failure):
                raise WireError(f"it refuses this node: {welcome.message[:_MAX_REASON]!r}")
            expected = proof(self._secret, "peer called", self._own_id, nonce, challenge.nonce)
            if not isinstance(welcome, m.Welcome) or not same(welcome.proof, expected):
                raise WireError("the peer does not know the cluster's secret, or we do not")
            channel.use_key(*session_keys(self._secret, nonce, challenge.nonce))
        except BaseException:
            channel.close()
            raise
        self._note_size(welcome.max_block_bytes)
        return channel

    def _note_size(self, max_block_bytes: int) -> None:
        """The peer is as it should be, but for the size of blocks, perhaps."""
        self.max_block_bytes = max_block_bytes
        if max_block_bytes < self._own_max_bytes:
            problem = (
                f"its --slab, the largest block that it takes, is {max_block_bytes} and that of this node "
                f"{self._own_max_bytes}: larger blocks stay where they were saved, and others do not find them"
            )
            self._complaints.warn(self._name, problem)
        else:
            self._complaints.forget(self._name)

    def _dialled(self, deadline_s: float) -> socket.socket:
        """A connection to the first address of the peer's name that answers."""
        problem: OSError = UnknownName("its name has no addresses")
        for address in self._lookup.addresses(max(0.0, deadline_s - time.monotonic())):
            try:
                return socket.create_connection(address, timeout=remaining_s(deadline_s))
            except OSError as error:
                problem = error
        raise problem

    def _complain(self, error: Exception) -> None:
        """Of a peer that is there and does not do as agreed, or that nobody can find; one that is away is no news."""
        if isinstance(error, UnknownName):
            self._complaints.warn(self._name, str(error))
        elif isinstance(error, WireError | ssl.SSLError | ConnectionResetError | BrokenPipeError):
            self._complaints.warn(self._name, problem_of(error, self._tls is not None))

    def end_revoked(self) -> bool:
        """Ends the connection if the peer's certificate is revoked by now; a call under way fails. Whether it did."""
        channel = self._channel
        if not isinstance(channel, TlsChannel) or not channel.is_revoked:
            return False
        channel.abort()
        with self._lock:
            if self._channel is channel:
                self._hang_up()
        return True

    def _hang_up(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def close(self) -> None:
        """Ends the connection; a call under way fails."""
        channel = self._channel
        if channel is not None:
            channel.abort()
        with self._lock:
            self._hang_up()
