"""ClientSession: one connected SDK. It authenticates, then answers one request after the other.

Everything a client holds (staging area, pins, reserved memory) ends with its connection, however that ends.
"""

import socket
import struct
import time
from collections.abc import Callable
from operator import add

from ems.common.channel import CHANNEL_ERRORS, Channel
from ems.common.exception import EmsErrorCode
from ems.keys import NONCE_BYTES, proof
from ems.runs import Bytes
from ems.wire import messages as m
from ems.wire.frames import Frame, WireError
from kvloom.pool.answering import Answer, answers, answers_of
from kvloom.pool.node import Node
from kvloom.pool.picking import Picker
from kvloom.pool.reading import Reader
from kvloom.pool.storage.counts import Counts, Denial
from kvloom.pool.storage.pool import Pool, Serving, Terms
from kvloom.pool.storage.segments import SharedMemory
from kvloom.pool.writing import NodeHomes, Writer

_UCRED = struct.Struct("3i")  # process, user, group of the peer
_HANDSHAKE_S = 5.0
_STAGING_SHARE = 0.5  # share of a call's time to wait for staging memory
_HELD_SHARE = 4  # answers are held back up to 1 / it of the staging area in all
_SEND_S = 10.0  # seconds after which a client that does not read its answers is disconnected


def count_end(counts: Counts, error: Exception) -> None:
    """Count the reason that ended a connection, unless the peer closed it."""
    if isinstance(error, WireError):
        counts.add(Denial.MALFORMED.counter)
    elif isinstance(error, TimeoutError):
        counts.add(Denial.LATE.counter)
    elif not (isinstance(error, ConnectionResetError) and error.errno is None):
        counts.add("sessions_broken")


class Refused(Exception):
    """The request cannot be served; the connection continues. `code` is an EmsErrorCode; denial: the counter."""

    def __init__(self, code: EmsErrorCode, message: str, denial: Denial = Denial.INVALID) -> None:
        super().__init__(message)
        self.code = code
        self.denial = denial


class ClientSession:
    """Runs in its own thread."""

    def __init__(self, channel: Channel, node: Node, new_nonce: Callable[[int], bytes]) -> None:
        self._channel = channel
        self._node = node
        self._new_nonce = new_nonce
        self._pool: Pool  # of the client's tenant, once that is known
        self._arena: SharedMemory | None = None
        self._held_bytes = 0  # bytes of the staging area that are saved, but not answered yet
        self._access_id = ""
        self._verifier = b""
        self._answers: dict[type[m.Message], Answer] = {}
        self._serving: Serving | None = None  # answers requests without Python
        self._board: Bytes | None = None

    def run(self, hello: m.Hello, request_id: int) -> None:
        """Serve the client from its Hello to the end of the connection. Never raises for what the client does."""
        try:
            tenant = self._authenticate(hello, request_id)
        except CHANNEL_ERRORS as error:
            count_end(self._node.counts, error)
            return
        if tenant is None:
            return
        pool = self._pool
        others, limit = self._node.others, self._node.put_limit(tenant)
        homes = NodeHomes(pool, others) if others is not None else None
        writer, reader = Writer(pool, self._node, self._staged, homes), Reader(pool, self._node)
        self._answers = answers_of(self, writer, reader, Picker(pool, self._node, reader))
        terms = Terms(
            keyring_version=self._node.keyring.version,
            homes=homes,
            may_put=writer.may_put if limit is not None else None,
            is_direct=self._node.config.is_direct,
            is_valid=self._is_valid,
            board=self._board,
        )
        self._serving = pool.serving(self._channel, terms)
        try:
            while True:
                frame = self._frames.receive()
                if not self._is_valid():
                    pool.counts.add(Denial.REVOKED.counter)
                    self._fail(frame, EmsErrorCode.EMS_IO_ERROR, "the access key was revoked")
                    return
                self._answer(frame)
                while writer.rest() and not self._frames.has_frame():
                    pass
        except CHANNEL_ERRORS as error:
            if isinstance(error, WireError | TimeoutError):
                count_end(pool.counts, error)
            else:
                count_end(self._node.counts, error)
        finally:
            writer.close()
            reader.close()
            self._drop_arena()
            if self._serving is not None:
                self._serving.close()

    def _is_valid(self) -> bool:
        """Whether the client's key was not revoked."""
        return self._node.keyring.is_valid(self._access_id, self._verifier)

    @property
    def _frames(self) -> "Serving | Channel":
        """The source of requests."""
        return self._serving or self._channel

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
            self._node.counts.add("auth_failures")
            pid, uid, _gid = _UCRED.unpack(
                self._channel.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
            )
            self._node.refused.note(f"access_id {hello.access_id!r}, process {pid} of user {uid}")
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
            pool=self._node.pool_id(tenant),
        )
        self._pool = self._node.pool(tenant)
        board = self._pool.board()
        fd, self._board = (board.fd, board.data) if board is not None else (None, None)
        try:
            self._channel.send(welcome, deadline_s, request_id=frame.request_id, fd=fd)
        finally:
            if board is not None:
                board.close()
        return tenant

    @answers(m.Ping)
    def ping(self, _message: m.Ping, _deadline_s: float) -> m.Done:
        """At once."""
        return m.Done()

    def _answer(self, frame: Frame) -> None:
        message, fd = frame.message, None
        answer: m.Message | None
        try:
            if isinstance(message, m.Arena):
                fd, answer = self._new_arena(message, time.monotonic() + frame.deadline_ms / 1000), m.Done()
            elif isinstance(message, m.Segment):
                fd, answer = self._pool.segment_fd(message.segment), m.Done()
                if fd is None:
                    raise Refused(EmsErrorCode.EMS_INVALID_ARGUMENT, "no such segment")
            elif type(message) in self._answers:
                answer = self._answers[type(message)](message, time.monotonic() + frame.deadline_ms / 1000)
            else:
                raise WireError("not a request")
        except Refused as refusal:
            self._pool.counts.add(refusal.denial.counter)
            self._fail(frame, refusal.code, str(refusal))
            return
        if isinstance(message, m.Save) and answer is not None and self._may_wait(message):
            self._channel.hold(answer, frame.request_id)
        elif answer is not None:
            self._held_bytes = 0
            self._channel.send(answer, time.monotonic() + _SEND_S, request_id=frame.request_id, fd=fd)

    def _may_wait(self, message: m.Save) -> bool:
        """Whether the answer may be sent with the next one: the client sends the rest of the batch first, and waits for
        the end or for part of the staging area.
        """
        self._held_bytes += sum(message.lengths)
        is_small = self._arena is not None and self._held_bytes < self._arena.size // _HELD_SHARE
        return is_small and not message.is_last and self._frames.has_frame()

    def _fail(self, frame: Frame, code: EmsErrorCode, text: str) -> None:
        self._channel.send(m.Failure(int(code), text), time.monotonic() + _SEND_S, request_id=frame.request_id)

    def _new_arena(self, message: m.Arena, deadline_s: float) -> int:
        """The descriptor of a new staging area that replaces the old one, of the size asked for or what is left."""
        self._drop_arena()
        staging, least = self._node.staging, message.least or message.size
        if not 0 < least <= message.size or least > staging.total_bytes:
            raise Refused(EmsErrorCode.EMS_INVALID_ARGUMENT, f"a staging area is 1 to {staging.total_bytes} bytes")
        now_s = time.monotonic()
        taken = staging.take(message.size, least, now_s + (deadline_s - now_s) * _STAGING_SHARE)
        if not taken:
            text = f"all {staging.total_bytes} bytes of staging memory are in use; see the agent's --staging"
            raise Refused(EmsErrorCode.EMS_IO_TIMEOUT, text, Denial.STAGING)
        try:
            self._node.staging.headroom.require(taken)
            self._arena = SharedMemory("ems-arena", taken, is_sealed=False)
        except OSError as error:
            staging.give_back(taken)
            problem = f"no memory for a staging area: {error}"
            raise Refused(EmsErrorCode.EMS_IO_ERROR, problem, Denial.NO_MEMORY) from None
        if self._serving is not None:
            self._serving.use_arena(self._arena)
        return self._arena.fd

    def _drop_arena(self) -> None:
        if self._arena is not None:
            if self._serving is not None:
                self._serving.use_arena(None)
            self._arena.close()
            self._node.staging.give_back(self._arena.size)
            self._arena = None

    def _staged(self, message: m.Save) -> SharedMemory:
        arena = self._arena
        if arena is None or max(map(add, message.offsets, message.lengths), default=0) > arena.size:
            raise Refused(EmsErrorCode.EMS_INVALID_ARGUMENT, "offsets: outside of the staging area")
        return arena
