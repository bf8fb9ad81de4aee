"""Links to the node agent: connect, authenticate, call, and map the memory the agent hands out.

A link serves one call at a time; the pool lends links out and throws away every one that failed or was late, because
the position in its stream is unknown. After an agent's restart the next loan connects anew.
"""

import contextlib
import mmap
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ems.common.channel import CHANNEL_ERRORS, Channel, remaining_ms
from ems.common.exception import EmsErrorCode, EmsException, io_error, io_timeout
from ems.keys import NONCE_BYTES, proof, same, verifier
from ems.wire import messages as m
from ems.wire.frames import WireError

Bytes = npt.NDArray[np.uint8]
_MAX_IDLE_LINKS = 8
_CONNECT_S = 5.0
SEED_SOCKET = Path("/dev/shm/ems/ems.sock")


def find_socket() -> Path | None:
    """The agent's socket: EMS_SOCKET, the seed's place, the user's runtime directory; None when there is none."""
    named = os.environ.get("EMS_SOCKET")
    if named:
        return Path(named)
    places = [SEED_SOCKET]
    if os.environ.get("XDG_RUNTIME_DIR"):
        places.append(Path(os.environ["XDG_RUNTIME_DIR"]) / "ems" / "ems.sock")
    return next((place for place in places if place.exists()), None)


class SegmentMaps:
    """Mappings of the agent's segments, shared by the links of a process; dropped when another agent answers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._incarnation = b""
        self._maps: dict[int, tuple[mmap.mmap, Bytes]] = {}

    def find(self, incarnation: bytes, segment: int) -> Bytes | None:
        with self._lock:
            if incarnation != self._incarnation:
                self._incarnation, self._maps = incarnation, {}
            found = self._maps.get(segment)
            return found[1] if found else None

    def add(self, incarnation: bytes, segment: int, fd: int, size: int, is_writable: bool) -> Bytes:
        """Maps the descriptor; a second mapping of the same segment is dropped in favour of the first."""
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
        mapped = mmap.mmap(fd, size, mmap.MAP_SHARED, protection)
        with self._lock:
            if incarnation != self._incarnation:
                self._incarnation, self._maps = incarnation, {}
            return self._maps.setdefault(segment, (mapped, np.frombuffer(mapped, np.uint8)))[1]


class Link:
    """An authenticated connection. Methods raise TimeoutError, OSError, WireError, or EmsException for a refusal."""

    def __init__(self, path: Path, access_id: str, access_key: str, maps: SegmentMaps, deadline_s: float) -> None:
        self._maps = maps
        self._arena: Bytes | None = None
        self._next_id = 0
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(0.001, deadline_s - time.monotonic()))
            sock.connect(str(path))
        except BaseException:
            sock.close()
            raise
        self.channel = Channel(sock)
        try:
            self.welcome = self._authenticate(access_id, access_key, deadline_s)
        except BaseException:
            self.channel.close()
            raise

    def _authenticate(self, access_id: str, access_key: str, deadline_s: float) -> m.Welcome:
        nonce = secrets.token_bytes(NONCE_BYTES)
        challenge = self.call(m.Hello(access_id, nonce), deadline_s)
        if not isinstance(challenge, m.Challenge):
            raise WireError("expected a challenge")
        is_open = challenge.salt == b""
        secret = verifier("" if is_open else access_key, challenge.salt)
        welcome = self.call(m.Proof(proof(secret, "client", access_id, nonce, challenge.nonce)), deadline_s)
        if not isinstance(welcome, m.Welcome):
            raise WireError("expected a welcome")
        if not same(welcome.proof, proof(secret, "agent", access_id, nonce, challenge.nonce)):
            raise WireError("the agent does not know our access key")
        return welcome

    def begin(self, message: m.Message, deadline_s: float) -> None:
        """Sends a request; answers come in the order of the requests."""
        self._next_id += 1
        self.channel.send(message, deadline_s, request_id=self._next_id, deadline_ms=remaining_ms(deadline_s))

    def finish(self, deadline_s: float) -> m.Message:
        """The answer to the oldest unanswered request."""
        message = self.channel.receive(deadline_s).message
        if isinstance(message, m.Failure):
            raise EmsException(EmsErrorCode(message.code), message.message)
        return message

    def call(self, message: m.Message, deadline_s: float) -> m.Message:
        """One request and its answer."""
        self.begin(message, deadline_s)
        return self.finish(deadline_s)

    def _call_for_fd(self, message: m.Message, deadline_s: float) -> int:
        self.begin(message, deadline_s)
        frame, fd = self.channel.receive_with_fd(deadline_s)
        if isinstance(frame.message, m.Failure):
            raise EmsException(EmsErrorCode(frame.message.code), frame.message.message)
        if fd < 0:
            raise WireError("expected a descriptor")
        return fd

    def arena(self, size: int, deadline_s: float) -> Bytes:
        """The staging area, at least `size` bytes; only this connection and the agent see it."""
        if self._arena is None or len(self._arena) < size:
            fd = self._call_for_fd(m.Arena(size), deadline_s)
            try:
                self._arena = np.frombuffer(mmap.mmap(fd, size), np.uint8)
            finally:
                os.close(fd)
        return self._arena

    def segment(self, segment: int, deadline_s: float) -> Bytes:
        """A segment of the tenant's pool, read-only unless the session is direct."""
        incarnation = self.welcome.incarnation
        found = self._maps.find(incarnation, segment)
        if found is None:
            fd = self._call_for_fd(m.Segment(segment), deadline_s)
            try:
                size = self.welcome.segment_bytes
                found = self._maps.add(incarnation, segment, fd, size, self.welcome.is_direct)
            finally:
                os.close(fd)
        return found

    def is_usable(self) -> bool:
        """Whether an idle link is still connected and has nothing unexpected to read."""
        poll = select.poll()
        try:
            poll.register(self.channel.sock, select.POLLIN)
            return not poll.poll(0)
        except (OSError, ValueError):
            return False

    def close(self) -> None:
        self.channel.close()


class LinkPool:
    """Lends links out. Any thread may call; a forked child starts with none."""

    def __init__(self, locate: Callable[[float], Path], access_id: str, access_key: str) -> None:
        """locate: finds the agent's socket, given a deadline, or raises OSError."""
        self._locate = locate
        self._access_id = access_id
        self._access_key = access_key
        self._start()

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Link] = []
        self._maps = SegmentMaps()
        self._is_closed = False

    @contextlib.contextmanager
    def lend(self, deadline_s: float) -> Iterator[Link]:
        """A link for one call. What goes wrong inside leaves as EmsException; then the link is not used again."""
        link = None
        try:
            link = self._take(deadline_s)
            yield link
        except TimeoutError:
            self._drop(link)
            raise io_timeout("the pool did not answer before the deadline") from None
        except CHANNEL_ERRORS as error:
            self._drop(link)
            raise io_error(f"lost the pool: {error}") from error
        except BaseException:
            self._drop(link)
            raise
        else:
            self._give_back(link)

    def _take(self, deadline_s: float) -> Link:
        while True:
            with self._lock:
                link = self._idle.pop() if self._idle else None
            if link is None:
                connect_s = min(deadline_s, time.monotonic() + _CONNECT_S)
                return Link(self._locate(connect_s), self._access_id, self._access_key, self._maps, connect_s)
            if link.is_usable():
                return link
            link.close()

    @staticmethod
    def _drop(link: Link | None) -> None:
        if link is not None:
            link.close()

    def _give_back(self, link: Link) -> None:
        with self._lock:
            if len(self._idle) < _MAX_IDLE_LINKS and not self._is_closed:
                self._idle.append(link)
                return
        link.close()

    def close(self) -> None:
        """Closes the idle links; lent ones close when they come back."""
        with self._lock:
            idle, self._idle, self._is_closed = self._idle, [], True
        for link in idle:
            link.close()

    def after_fork(self) -> None:
        """In a forked child: forgets the parent's connections without saying anything on them."""
        for link in self._idle:
            link.close()
        self._start()
