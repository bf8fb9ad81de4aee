"""ClientSession: one connected SDK. It authenticates, then answers one request after the other.

Everything a client holds (staging area, pins, reserved places) ends with its connection, however that ends.
"""

import time
from collections.abc import Callable
from operator import add
from typing import Any

from ems.common.channel import CHANNEL_ERRORS, Channel
from ems.common.exception import EmsErrorCode
from ems.keys import NONCE_BYTES, proof
from ems.wire import messages as m
from ems.wire.frames import Frame, WireError
from kvloom.pool.node import Node
from kvloom.pool.reading import Reader
from kvloom.pool.segments import SharedMemory
from kvloom.pool.writing import Writer

_HANDSHAKE_S = 5.0
_SEND_S = 10.0  # a client that takes its answers no faster is gone


class Refused(Exception):
    """The request cannot be served; the connection goes on. `code` is an EmsErrorCode."""

    def __init__(self, code: EmsErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class ClientSession:
    """Runs in its own thread."""

    def __init__(self, channel: Channel, node: Node, new_nonce: Callable[[int], bytes]) -> None:
        self._channel = channel
        self._node = node
        self._new_nonce = new_nonce
        self._arena: SharedMemory | None = None
        self._access_id = ""
        self._verifier = b""

    def run(self, hello: m.Hello, request_id: int) -> None:
        """From the client's Hello to the end of the connection. Never raises for what the client does."""
        try:
            tenant = self._authenticate(hello, request_id)
        except CHANNEL_ERRORS:
            return
        if tenant is None:
            return
        pool = self._node.pool(tenant)
        writer, reader = Writer(pool, self._node), Reader(pool, self._node)
        handlers: dict[type[m.Message], Callable[[Any, float], m.Message | None]] = {
            m.Save: lambda message, deadline_s: writer.save(message, self._staged(message), deadline_s),
            m.Reserve: lambda message, _: writer.reserve(message),
            m.Commit: lambda message, _: writer.commit(message),
            m.Load: reader.load,
            m.Release: reader.release,
            m.Exists: reader.exists,
            m.Ping: lambda _message, _: m.Done(),
        }
        try:
            while True:
                frame = self._channel.receive()
                if not self._node.keyring.is_valid(self._access_id, self._verifier):
                    self._fail(frame, EmsErrorCode.EMS_IO_ERROR, "the access key was revoked")
                    return
                self._answer(frame, handlers, pool.segment_fd)
                while writer.rest() and not self._channel.has_frame():
                    pass
        except CHANNEL_ERRORS:
            self._node.counts["sessions_broken"] += 1
        finally:
            writer.close()
            reader.close()
            if self._arena is not None:
                self._arena.close()

    def _authenticate(self, hello: m.Hello, request_id: int) -> str | None:
        deadline_s = time.monotonic() + _HANDSHAKE_S
        nonce = self._new_nonce(NONCE_BYTES)
        keyring = self._node.keyring
        challenge = m.Challenge(nonce, keyring.salt(hello.access_id))
        self._channel.send(challenge, deadline_s, request_id=request_id)
        frame = self._channel.receive(deadline_s)
        if not isinstance(frame.message, m.Proof):
            raise WireError("expected a proof")
        opened = keyring.open(hello.access_id, frame.message.proof, hello.nonce, nonce)
        if opened is None:
            self._node.counts["auth_failures"] += 1
            self._fail(frame, EmsErrorCode.EMS_IO_ERROR, "access_id or access_key is wrong")
            return None
        tenant, self._verifier = opened
        self._access_id = hello.access_id
        config = self._node.config
        welcome = m.Welcome(
            incarnation=self._node.incarnation,
            key_salt=self._node.key_salt(tenant),
            proof=proof(self._verifier, "agent", hello.access_id, hello.nonce, nonce),
            segment_bytes=config.segment_bytes,
            max_block_bytes=config.slab_bytes,
            is_direct=config.is_direct,
        )
        self._channel.send(welcome, deadline_s, request_id=frame.request_id)
        return tenant

    def _answer(
        self,
        frame: Frame,
        handlers: dict[type[m.Message], Callable[[Any, float], m.Message | None]],
        segment_fd: Callable[[int], int | None],
    ) -> None:
        message, fd = frame.message, None
        answer: m.Message | None
        try:
            if isinstance(message, m.Arena):
                fd, answer = self._new_arena(message.size), m.Done()
            elif isinstance(message, m.Segment):
                fd, answer = segment_fd(message.segment), m.Done()
                if fd is None:
                    raise Refused(EmsErrorCode.EMS_INVALID_ARGUMENT, "no such segment")
            elif type(message) in handlers:
                answer = handlers[type(message)](message, time.monotonic() + frame.deadline_ms / 1000)
            else:
                raise WireError("not a request")
        except Refused as refusal:
            self._fail(frame, refusal.code, str(refusal))
            return
        if isinstance(message, m.Save) and not message.is_last and answer is not None and self._channel.has_frame():
            self._channel.hold(answer, frame.request_id)  # its client sends the rest of the batch and waits for the end
        elif answer is not None:
            self._channel.send(answer, time.monotonic() + _SEND_S, request_id=frame.request_id, fd=fd)

    def _fail(self, frame: Frame, code: EmsErrorCode, text: str) -> None:
        self._channel.send(m.Failure(int(code), text), time.monotonic() + _SEND_S, request_id=frame.request_id)

    def _new_arena(self, size: int) -> int:
        if not 0 < size <= self._node.config.max_arena_bytes:
            limit = self._node.config.max_arena_bytes
            raise Refused(EmsErrorCode.EMS_INVALID_ARGUMENT, f"a staging area is 1 to {limit} bytes")
        if self._arena is not None:
            self._arena.close()
        self._arena = SharedMemory("ems-arena", size, is_sealed=False)
        return self._arena.fd

    def _staged(self, message: m.Save) -> SharedMemory:
        arena = self._arena
        if arena is None or max(map(add, message.offsets, message.lengths), default=0) > arena.size:
            raise Refused(EmsErrorCode.EMS_INVALID_ARGUMENT, "offsets: outside of the staging area")
        return arena
