"""Links to the node agent: connect, authenticate, call, and map the agent's memory.

A link serves one call at a time. The pool lends links, and closes every link that failed or was late, because its
position in the stream is unknown. After an agent's restart the next loan reconnects.
"""

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from ems.common.channel import CHANNEL_ERRORS, Channel, remaining_ms
from ems.common.exception import EmsErrorCode, EmsException, io_error, io_timeout
from ems.common.maps import SegmentMaps
from ems.common.memory import map_shared
from ems.common.sockets import why_unreachable
from ems.keys import KEY_BYTES, NONCE_BYTES, proof, same, verifier
from ems.native.calls import NativeCalls, Sizes
from ems.native.functions import Load, Save
from ems.native.line import Loaded, Mapped, Maps, NativeLine, Unexpected, WantedLoad, native_line
from ems.native.plan import Planner
from ems.runs import Bytes
from ems.wire import messages as m
from ems.wire.frames import WireError

T = TypeVar("T")
A = TypeVar("A", bound=m.Message)
log = logging.getLogger("ems")
WAS_CLOSED = "the pool was closed"
_MAX_IDLE_LINKS = 8
_FLOOR_S = 0.02  # timeout=0 still needs one round trip to the agent on this node
_CONNECT_S = 5.0
_RETRY_S = 0.005  # pause before retrying an agent whose queue of connections is full


def deadline_of(timeout_ms: int, start_s: float) -> float:
    """The deadline (time.monotonic) of a call that began at `start_s`."""
    return start_s + max(_FLOOR_S, timeout_ms / 1000)


class Link:
    """An authenticated connection. Methods raise TimeoutError, OSError, WireError, or EmsException for a refusal."""

    def __init__(self, path: Path, access_id: str, access_key: str, maps: SegmentMaps, deadline_s: float) -> None:
        self._maps = maps
        self._arena: Bytes | None = None
        self._arena_asked = 0
        self._board: Bytes | None = None
        self._next_id = 0
        self.channel = Channel(_connected(path, deadline_s))
        self._line: NativeLine | None = None
        self._calls: NativeCalls | None = None
        try:
            self.welcome = self._authenticate(access_id, access_key, deadline_s)
        except BaseException:
            self.channel.close()
            raise

    def _authenticate(self, access_id: str, access_key: str, deadline_s: float) -> m.Welcome:
        nonce = secrets.token_bytes(NONCE_BYTES)
        challenge = self.call(m.Hello(access_id, nonce), deadline_s)
        is_open = challenge.salt == b""
        secret = verifier("" if is_open else access_key, challenge.salt)
        known = m.Proof(proof(secret, "client", access_id, nonce, challenge.nonce))
        with self._call_with_fd(known, deadline_s) as (welcome, fd):
            if not same(welcome.proof, proof(secret, "agent", access_id, nonce, challenge.nonce)):
                raise WireError("the agent does not know our access key")
            if fd >= 0:
                self._board = map_shared(fd, m.BOARD_BYTES, is_writable=True)
        return welcome

    def begin(self, message: m.Message, deadline_s: float) -> None:
        """Send a request; answers come in the order of the requests."""
        self._next_id += 1
        self.channel.send(message, deadline_s, request_id=self._next_id, deadline_ms=remaining_ms(deadline_s))

    def finish(self, answer: type[A], deadline_s: float) -> A:
        """The answer to the oldest unanswered request."""
        return _checked(self.channel.receive(deadline_s).message, answer)

    def call(self, request: m.Request[A], deadline_s: float) -> A:
        """One request and its answer."""
        self.begin(request, deadline_s)
        return self.finish(request.ANSWER, deadline_s)

    def exists(self, keys: bytes, is_local: bool, deadline_s: float) -> int:
        """Length of the prefix of the packed keys that a load would find."""
        line = self._native()
        if line is not None:
            try:
                return line.exists(keys, is_local, deadline_s)
            except Unexpected as unexpected:
                raise self._unexpected(unexpected.data) from None
        count, step = 0, m.MAX_KEYS * KEY_BYTES
        for start in range(0, len(keys), step):
            part = keys[start : start + step]
            found = self.call(m.Exists(part, is_local), deadline_s).count
            count += found
            if found * KEY_BYTES < len(part):
                break
        return count

    def _native(self) -> NativeLine | None:
        """This link in C++, as soon as the library is available."""
        if self._line is None:
            self._line = native_line(self.channel.sock.fileno(), self._board)
        return self._line

    @property
    def is_native(self) -> bool:
        """Whether `load` and `save` may be called."""
        return self._native() is not None

    def calls(self, planner: Planner, regions: tuple[int, int, int]) -> NativeCalls | None:
        """Plain calls in one step each; None where Python carries them out. regions: the last three of `Sizes`."""
        if self._calls is None or self._calls.planner is not planner:
            line = self._native()
            if line is None:
                return None
            sizes = Sizes(self.welcome.max_block_bytes, *regions, self.welcome.is_direct)
            self._calls = NativeCalls(line, planner, sizes)
        return self._calls

    @property
    def mapped(self) -> Mapped:
        """The segments that are mapped, for C++."""
        return self._maps.mapped(self.welcome.incarnation)

    @property
    def staging(self) -> tuple[Bytes | None, int]:
        """The staging area, if there is one, and the size that was asked for."""
        return self._arena, self._arena_asked

    def load(self, wanted: WantedLoad, deadline_s: float) -> Loaded:
        """Loads a batch in C++, the longest prefix that the pool has."""
        return self._told(lambda line: line.load(wanted, self._maps_by(deadline_s), deadline_s))

    def finish_load(self, load: Load, problem: int, deadline_s: float) -> Loaded:
        """Continue a load that `calls` has begun."""
        return self._told(lambda line: line.finish(load, problem, self._maps_by(deadline_s)))

    def save(self, save: Save, deadline_s: float) -> None:
        """Save a batch in C++; writes the results into `save`, also when it raises."""
        self._told(lambda line: line.save(save, self._maps_by(deadline_s), deadline_s))

    def finish_save(self, save: Save, problem: int, deadline_s: float) -> None:
        """Continue a save that `calls` has begun, or raise its error."""
        self._told(lambda line: line.finish_save(save, problem, self._maps_by(deadline_s)))

    def check(self, problem: int) -> None:
        """Raise the error of a call in C++."""
        self._told(lambda line: line.check(problem))

    def _told(self, call: Callable[[NativeLine], T]) -> T:
        """The result of a call in C++, with the errors of a link."""
        assert self._line is not None, "there is a library"
        try:
            return call(self._line)
        except IndexError as error:
            raise WireError(str(error)) from None
        except Unexpected as unexpected:
            raise self._unexpected(unexpected.data) from None

    def _maps_by(self, deadline_s: float) -> Maps:
        def maps(numbers: list[int] | None, num_given_back: int) -> Mapped:
            if numbers is not None:
                self.keep_up(num_given_back)
                for number in set(numbers):
                    self.segment(number, deadline_s)
            return self.mapped

        return maps

    def _unexpected(self, data: bytes) -> WireError:
        """The error for an answer that C++ did not expect. Raises EmsException for a refusal."""
        self.channel.feed(data)
        answer = self.finish(m.Message, time.monotonic())
        return WireError(f"expected another answer than {type(answer).__name__}")

    @contextlib.contextmanager
    def _call_with_fd(self, request: m.Request[A], deadline_s: float) -> Iterator[tuple[A, int]]:
        """One request, its answer, and the descriptor that came with it, -1 when there was none."""
        self.begin(request, deadline_s)
        frame, fd = self.channel.receive_with_fd(deadline_s)
        try:
            yield _checked(frame.message, request.ANSWER), fd
        finally:
            if fd >= 0:
                os.close(fd)

    @contextlib.contextmanager
    def _call_for_fd(self, request: m.Request[A], deadline_s: float) -> Iterator[int]:
        with self._call_with_fd(request, deadline_s) as (_answer, fd):
            if fd < 0:
                raise WireError("expected a descriptor")
            yield fd

    def arena(self, size: int, least: int, deadline_s: float) -> Bytes:
        """The staging area: `size` bytes, or at least `least` if the agent is short; visible to the agent and this
        process only.
        """
        if self._arena is None or size > self._arena_asked or len(self._arena) < least:
            self._arena = None
            with self._call_for_fd(m.Arena(size, least), deadline_s) as fd:
                self._arena = map_shared(fd, os.fstat(fd).st_size, is_writable=True)
                self._arena_asked = size
        return self._arena

    def keep_up(self, num_given_back: int) -> None:
        """The pool has given so many segments back: drop stale mappings."""
        self._maps.keep_up(self.welcome.incarnation, num_given_back)

    def segment(self, segment: int, deadline_s: float) -> Bytes:
        """A segment of the tenant's pool, read-only unless the session is direct."""
        incarnation = self.welcome.incarnation
        found = self._maps.find(incarnation, segment)
        if found is None:
            with self._call_for_fd(m.Segment(segment), deadline_s) as fd:
                size = self.welcome.segment_bytes
                found = self._maps.add(incarnation, segment, fd, size, self.welcome.is_direct)
        return found

    def complain(self, problem: str) -> None:
        """Log it, once for each agent."""
        if self._maps.is_news(self.welcome.incarnation, problem):
            log.warning("%s", problem)

    def is_usable(self) -> bool:
        """Whether an idle link is still connected and has nothing to read."""
        return not self.channel.has_frame()

    def close(self) -> None:
        self.channel.close()


def _checked(message: m.Message, expected: type[A]) -> A:
    """An answer of the expected kind. Raises EmsException for a refusal, WireError for another answer."""
    if isinstance(message, m.Failure):
        raise EmsException(EmsErrorCode(message.code), message.message)
    if not isinstance(message, expected):
        raise WireError(f"expected another answer than {type(message).__name__}")
    return message


def _connected(path: Path, deadline_s: float) -> socket.socket:
    """A connected socket; waits while the agent's queue is full. Raises OSError, TimeoutError when late."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        while True:
            try:
                sock.settimeout(max(0.001, deadline_s - time.monotonic()))
                sock.connect(str(path))
                return sock
            except (PermissionError, FileNotFoundError, ConnectionRefusedError) as error:
                raise type(error)(why_unreachable(path, error)) from None
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise TimeoutError("the agent has too many callers") from None
                time.sleep(_RETRY_S)
    except BaseException:
        sock.close()
        raise


class LinkPool:
    """Lends links. May be called from any thread; a forked child starts with none."""

    def __init__(self, locate: Callable[[float], Path], access_id: str, access_key: str) -> None:
        """locate: finds the agent's socket, given a deadline, or raises OSError."""
        self._locate = locate
        self._access_id = access_id
        self._access_key = access_key
        self.pool_id = b""  # messages.Welcome.pool of the last connection; empty before the first
        self._why_closed = ""  # what calls are told; empty while it is open
        self._start()

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Link] = []
        self._maps = SegmentMaps()

    @contextlib.contextmanager
    def lend(self, deadline_s: float, link: Link | None = None) -> Iterator[Link]:
        """A link for one call. Errors inside leave as EmsException; then the link is closed.

        link: one from `take_idle`, on which a call was begun.
        """
        try:
            link = link or self._take(deadline_s)
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
            self.give_back(link)

    def take_idle(self) -> Link | None:
        """A connected idle link; the caller lends it or gives it back."""
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _take(self, deadline_s: float) -> Link:
        while True:
            with self._lock:
                if self._why_closed:
                    raise io_error(self._why_closed)
            link = self.take_idle()
            if link is None:
                connect_s = min(deadline_s, time.monotonic() + _CONNECT_S)
                made = Link(self._locate(connect_s), self._access_id, self._access_key, self._maps, connect_s)
                self.pool_id = made.welcome.pool
                return made
            if link.is_usable():
                return link
            link.close()

    @staticmethod
    def _drop(link: Link | None) -> None:
        if link is not None:
            link.close()

    def give_back(self, link: Link) -> None:
        """After a call all of whose answers were read."""
        with self._lock:
            if len(self._idle) < _MAX_IDLE_LINKS and not self._why_closed:
                self._idle.append(link)
                return
        link.close()

    @property
    def is_closed(self) -> bool:
        return bool(self._why_closed)

    def close(self, why: str = WAS_CLOSED) -> None:
        """Close the idle links; lent ones close when they come back. why: the error of later calls."""
        with self._lock:
            idle, self._idle, self._why_closed = self._idle, [], why
        for link in idle:
            link.close()
        self._maps.close()

    def after_fork(self) -> None:
        """In a forked child: forget the parent's connections without writing to them. A closed pool stays closed."""
        for link in self._idle:
            link.close()
        self._start()
