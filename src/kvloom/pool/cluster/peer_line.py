"""PeerLine: one connection to another node, for one call at a time; reconnects when it breaks."""

import secrets
import socket
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
from kvloom.pool.cluster.secured import Complaints, SecuredChannel, TlsBroken, problem_of
from kvloom.pool.config import Address
from kvloom.pool.storage.seals import sealed

if TYPE_CHECKING:
    from kvloom.pool.cluster.tls_channel import NodeTls

_CONNECT_S = 1.0
_MAX_REASON = 300  # characters of the peer's refusal in the log
# a call that waited this long for others, none of which was answered, counts as a failure of the peer
_PATIENCE_S = 0.5


def session_keys(secret: bytes, client_nonce: bytes, agent_nonce: bytes) -> tuple[bytes, bytes]:
    """Frame keys of the calling and of the called node, for this pair of nonces."""
    name = (client_nonce + agent_nonce).hex()
    return derive(secret, "peer frames of caller", name), derive(secret, "peer frames of called", name)


class Unsealed(WireError):
    """Another node's blocks come without seals, so that nothing shows whose their bytes are."""


def checked_sums(message: m.PeerBlocks | m.PeerPut, keys: bytes) -> bytes:
    """The checksums that announced blocks have if they belong to `keys`, 16 bytes each. Raises Unsealed."""
    if len(message.seals) != len(message.sums):
        raise Unsealed("it runs an earlier version, whose blocks do not prove what they are: update it")
    return sealed(keys, message.seals)


def ask(channel: Channel, message: m.Message, deadline_s: float) -> m.Message:
    """Send one message and return its answer."""
    channel.send(message, deadline_s, deadline_ms=remaining_ms(deadline_s))
    return channel.receive(deadline_s).message


@dataclass(frozen=True, slots=True)
class Own:
    """How this node presents itself to others. tls: files, None = not encrypted. num_lines: connections to each node
    that one load may use at once. max_block_bytes: the largest block that this node accepts.
    """

    node_id: str
    secret: bytes
    tls: "NodeTls | None" = None
    num_lines: int = 1
    max_block_bytes: int = 0


class PeerLine:
    """May be called from any thread. Never raises for errors of the other machine or of the network."""

    def __init__(self, address: Address, own: Own, breaker: Breaker, complaints: Complaints) -> None:
        """breaker, complaints: shared by all lines to the peer."""
        self._own_id = own.node_id
        self._own_max_bytes = own.max_block_bytes
        self.max_block_bytes = 0  # largest block that the peer accepts; 0 = it has not said
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
        self._is_answered = False  # whether the peer has begun to answer the present call
        self.num_waiting = 0  # approximate number of waiting calls

    def call(self, deadline_s: float, call: Callable[[Channel], Cause]) -> Cause:
        """Run `call(channel)` in turn if the breaker allows it. Returns its result, or what went wrong.

        It may run twice: a connection that broke since its last use is replaced.
        """
        start_s = time.monotonic()
        if start_s >= deadline_s:
            return Cause.TIMEOUT  # not the peer's fault
        if not self._lock.acquire(blocking=False) and not self._wait(deadline_s - start_s):
            now_s = time.monotonic()
            if self._answered_s < start_s <= now_s - _PATIENCE_S:
                self._breaker.fail(now_s)
            return Cause.TIMEOUT
        try:
            if not self._breaker.allows(time.monotonic()):
                return Cause.PEER_DOWN
            failures, begun_s, self._is_answered = self._breaker.failures, time.monotonic(), False
            try:
                result = self._try(call, deadline_s)
            except CHANNEL_ERRORS as error:
                is_late, now_s = isinstance(error, TimeoutError), time.monotonic()
                if self._breaker.failures == failures:  # otherwise another line has seen the same failure
                    if is_late:
                        self._breaker.give_up(now_s - begun_s, now_s, self._is_answered)
                    else:
                        self._breaker.fail(now_s)
                return Cause.TIMEOUT if is_late else Cause.PEER_DOWN
            self._answered_s = time.monotonic()
            self._breaker.succeed()
            return result
        finally:
            self._lock.release()

    def _wait(self, timeout_s: float) -> bool:
        """Acquire the lock. Returns whether it is held."""
        self.num_waiting += 1
        try:
            return self._lock.acquire(timeout=timeout_s)
        finally:
            self.num_waiting -= 1

    def _try(self, call: Callable[[Channel], Cause], deadline_s: float) -> Cause:
        """Run on the present connection, then on a new one. Raises as the channel does."""
        if self._channel is not None:
            try:
                return self._run(call, self._channel)
            except CHANNEL_ERRORS as error:
                self._hang_up()
                if isinstance(error, TimeoutError):
                    raise
        try:
            self._channel = self._connect(deadline_s)
            if isinstance(self._channel, SecuredChannel):
                self._channel.refuse_revoked()
        except CHANNEL_ERRORS as error:
            self._complain(error)
            self._hang_up()
            raise
        try:
            return self._run(call, self._channel)
        except CHANNEL_ERRORS:
            self._hang_up()
            raise

    def _run(self, call: Callable[[Channel], Cause], channel: Channel) -> Cause:
        num_before = channel.num_received
        try:
            return call(channel)
        except Unsealed as error:
            self._complain(error)
            raise
        finally:
            self._is_answered = channel.num_received > num_before

    def _connect(self, deadline_s: float) -> Channel:
        deadline_s = min(deadline_s, time.monotonic() + _CONNECT_S)
        sock = self._dialled(deadline_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel = Channel(sock) if self._tls is None else self._tls.channel(sock, is_server=False)
        try:
            if isinstance(channel, SecuredChannel):
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
        """The peer is valid; log if it accepts only smaller blocks than this node."""
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
        """Log a peer that misbehaves or whose name cannot be resolved; one that is down is not logged."""
        if isinstance(error, UnknownName):
            self._complaints.warn(self._name, str(error))
        elif isinstance(error, WireError | TlsBroken | ConnectionResetError | BrokenPipeError):
            self._complaints.warn(self._name, problem_of(error, self._tls is not None))

    def end_revoked(self) -> bool:
        """End the connection if the peer's certificate has been revoked; a call under way fails. Returns whether it
        did.
        """
        channel = self._channel
        if not isinstance(channel, SecuredChannel) or not channel.is_revoked:
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
        """Close the connection; a call under way fails."""
        channel = self._channel
        if channel is not None:
            channel.abort()
        with self._lock:
            self._hang_up()
