"""PeerLink: this node's calls to one other node: one connection, one call at a time, a breaker, a queue of pushes."""

import contextlib
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import xxhash

from ems.common.channel import CHANNEL_ERRORS, Channel, remaining_ms, remaining_s
from ems.keys import NONCE_BYTES, derive, proof, same
from ems.wire import messages as m
from ems.wire.frames import WireError
from kvloom.pool.config import Address
from kvloom.pool.entries import Entry, Place
from kvloom.pool.placement import Breaker
from kvloom.pool.store import TenantPool

_CONNECT_S = 1.0
_PUSH_S = 5.0
_MAX_QUEUE = 256  # blocks waiting to be pushed; more are not sent: they stay readable here


def session_keys(secret: bytes, client_nonce: bytes, agent_nonce: bytes) -> tuple[bytes, bytes]:
    """Keys of the frames from the calling node and from the called one, for this pair of nonces."""
    name = (client_nonce + agent_nonce).hex()
    return derive(secret, "peer frames of caller", name), derive(secret, "peer frames of called", name)


@dataclass(frozen=True, slots=True)
class _Push:
    pool: TenantPool
    entry: Entry
    parent: bytes


class PeerLink:
    """Any thread may call. Nothing here raises for what happens on the other machine or in between."""

    def __init__(self, own_id: str, address: Address, secret: bytes) -> None:
        self.address = address
        self.breaker = Breaker()
        self._own_id = own_id
        self._secret = secret
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._pushes: queue.Queue[_Push | None] = queue.Queue(_MAX_QUEUE)
        self._thread = threading.Thread(target=self._push_all, name="ems-push", daemon=True)
        self._thread.start()

    def get(self, pool: TenantPool, keys: list[bytes], deadline_s: float) -> tuple[str, list[Entry]]:
        """Brings the blocks the peer has into the pool.

        Returns "", or "TIMEOUT", "PEER_DOWN", "CORRUPT", "NO_ROOM", and the blocks that came, pinned.
        """
        entries: list[Entry] = []
        problem = self._guarded(deadline_s, lambda channel: self._get(channel, pool, keys, entries, deadline_s))
        return problem, entries

    def has(self, tenant: str, keys: list[bytes], deadline_s: float) -> list[bool]:
        """For each key whether the peer has it; all False when it does not answer."""
        found: list[bool] = [False] * len(keys)

        def ask(channel: Channel) -> str:
            answer = self._ask(channel, m.PeerGet(tenant, b"".join(keys), has_only=True), deadline_s)
            if not isinstance(answer, m.PeerBlocks) or len(answer.lengths) != len(keys):
                raise WireError("expected blocks")
            found[:] = [length > 0 for length in answer.lengths]
            return ""

        self._guarded(deadline_s, ask)
        return found

    def put(self, tenant: str, blocks: list[tuple[bytes, memoryview, bytes]], parent: bytes, deadline_s: float) -> bool:
        """Stores blocks (key, bytes, checksum), a chain after `parent`, on the peer; False when not all arrived."""

        def send(channel: Channel) -> str:
            keys = b"".join(key for key, _data, _sum in blocks)
            sums = b"".join(checksum for _key, _data, checksum in blocks)
            message = m.PeerPut(tenant, keys, [len(data) for _key, data, _sum in blocks], sums, parent)
            channel.send(message, deadline_s, deadline_ms=remaining_ms(deadline_s))
            for _key, data, _sum in blocks:
                channel.send_bytes(data, deadline_s)
            answer = channel.receive(deadline_s).message
            if not isinstance(answer, m.Saved):
                raise WireError("expected the result of a save")
            return "" if all(m.Status(status).is_success for status in answer.statuses) else "NO_ROOM"

        return self._guarded(deadline_s, send) == ""

    def push_later(self, pool: TenantPool, entry: Entry, parent: bytes) -> None:
        """Queues a pinned block for the peer; the pin ends when it is sent or given up."""
        try:
            self._pushes.put_nowait(_Push(pool, entry, parent))
        except queue.Full:
            pool.counts["push_dropped"] += 1
            pool.unpin([entry])

    def _push_all(self) -> None:
        while (push := self._pushes.get()) is not None:
            entry = push.entry
            data = push.pool.view(entry.offset, entry.length).data
            block = (entry.key, data, entry.checksum)
            is_done = self.put(push.pool.tenant, [block], push.parent, time.monotonic() + _PUSH_S)
            push.pool.counts["push_done" if is_done else "push_failed"] += 1
            push.pool.unpin([entry])

    def _guarded(self, deadline_s: float, call: Callable[[Channel], str]) -> str:
        """Runs `call(channel)` under the lock and the breaker; a failure closes the connection."""
        if not self._lock.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
            return "TIMEOUT"
        try:
            if not self.breaker.allows(time.monotonic()):
                return "PEER_DOWN"
            try:
                if self._channel is None:
                    self._channel = self._connect(deadline_s)
                result = call(self._channel)
            except CHANNEL_ERRORS as error:
                self._hang_up()
                self.breaker.fail(time.monotonic())
                return "TIMEOUT" if isinstance(error, TimeoutError) else "PEER_DOWN"
            self.breaker.succeed()
            return result
        finally:
            self._lock.release()

    def _connect(self, deadline_s: float) -> Channel:
        deadline_s = min(deadline_s, time.monotonic() + _CONNECT_S)
        place = (self.address.host, self.address.port)
        channel = Channel(socket.create_connection(place, timeout=remaining_s(deadline_s)))
        try:
            channel.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            nonce = secrets.token_bytes(NONCE_BYTES)
            challenge = self._ask(channel, m.Hello(self._own_id, nonce, is_peer=True), deadline_s)
            if not isinstance(challenge, m.Challenge):
                raise WireError("expected a challenge")
            claim = proof(self._secret, "peer caller", self._own_id, nonce, challenge.nonce)
            welcome = self._ask(channel, m.Proof(claim), deadline_s)
            expected = proof(self._secret, "peer called", self._own_id, nonce, challenge.nonce)
            if not isinstance(welcome, m.Welcome) or not same(welcome.proof, expected):
                raise WireError("the peer does not know the cluster's secret, or we do not")
            channel.use_key(*session_keys(self._secret, nonce, challenge.nonce))
        except BaseException:
            channel.close()
            raise
        return channel

    @staticmethod
    def _ask(channel: Channel, message: m.Message, deadline_s: float) -> m.Message:
        channel.send(message, deadline_s, deadline_ms=remaining_ms(deadline_s))
        return channel.receive(deadline_s).message

    def _get(
        self, channel: Channel, pool: TenantPool, keys: list[bytes], entries: list[Entry], deadline_s: float
    ) -> str:
        answer = self._ask(channel, m.PeerGet(pool.tenant, b"".join(keys)), deadline_s)
        if not isinstance(answer, m.PeerBlocks) or len(answer.lengths) != len(keys):
            raise WireError("expected blocks")
        problem = ""
        for key, length, checksum in zip(keys, answer.lengths, m.split_sums(answer.sums), strict=True):
            if length:
                one, _status, entry = receive_block(channel, pool, key, length, checksum, b"", True, deadline_s)
                problem = one or problem
                if entry is not None:
                    entries.append(entry)
        return problem

    def _hang_up(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def close(self) -> None:
        """Ends the pushes and the connection; a call under way fails."""
        with contextlib.suppress(queue.Full):
            self._pushes.put_nowait(None)
        channel = self._channel
        if channel is not None:
            with contextlib.suppress(OSError):
                channel.sock.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._hang_up()


def receive_block(
    channel: Channel,
    pool: TenantPool,
    key: bytes,
    length: int,
    checksum: bytes,
    parent: bytes,
    is_rcache: bool,
    deadline_s: float,
) -> tuple[str, m.Status, Entry | None]:
    """Reads one block's bytes from the channel into the pool and publishes it if its checksum holds.

    Returns what went wrong ("", "CORRUPT", "NO_ROOM"), the status, and the block of that key, pinned, if there is one.
    Raises as the channel does; then nothing is kept.
    """
    place = pool.begin(key, length, is_rcache)
    if not isinstance(place, Place):
        channel.receive_into(memoryview(bytearray(length)), deadline_s)
        if isinstance(place, Entry):
            same_bytes = place.checksum == checksum and place.length == length
            return "", m.Status.DUPLICATE if same_bytes else m.Status.CONFLICT, place
        return "NO_ROOM", place, None
    try:
        view = pool.view(place.offset, length).data
        channel.receive_into(view, deadline_s)
    except BaseException:
        pool.abandon(place)
        raise
    if xxhash.xxh3_128_digest(view) != checksum:
        pool.abandon(place)
        pool.counts["corrupt_on_wire"] += 1
        return "CORRUPT", m.Status.NO_ROOM, None
    return "", *pool.publish(place, checksum, parent)
