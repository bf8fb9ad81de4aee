"""Where bodies are parsed: small ones on the loop; large ones, and grammars, in another process.

Decoding, chat templates, tokenising and compiling grammars hold the interpreter lock for a time that grows with the
body. Another process cannot block the loop, can be killed at any moment, and is certain to give its memory back. Its
side is parse_process.py.
"""

import asyncio
import contextlib
import io
import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from kvloom.contract.errors import NotFound, Overloaded, ServingError
from kvloom.contract.images import Sight
from kvloom.processes.child import signals_held_at_start
from kvloom.server.errors import BUG_TEXT, TooLarge
from kvloom.server.http.job import Job, JobAndMore
from kvloom.server.http.reply import Endpoint, HttpRequest
from kvloom.server.http.turns import Turns
from kvloom.server.serving.inline import NotInline, inline
from kvloom.server.serving.notes import noting
from kvloom.server.serving.options import WireOptions
from kvloom.server.serving.registry import AdapterNames, Models
from kvloom.server.serving.service import GenerationService
from kvloom.server.serving.vision.seen import NotSeen, seeing

INLINE_BYTES = 8 << 10  # bytes; smaller bodies are parsed on the loop: about 10 ms of tokenising
_LARGE_BYTES = 1 << 20  # bytes; the worker of a larger body ends with it
_MAX_BYTES = 256 << 20  # bytes of bodies that are being parsed or wait for it
_MAX_WAITING = 256  # number of these
_MAX_REPLY_BYTES = 8 << 20  # bytes of a result; reading more would block the loop
_MAX_FILES_BYTES = 64 << 20  # bytes of images among it, which are taken without copying
_LIMIT_S = 60.0
_SIGHT = 0  # stands for images that stay in the server
LENGTH = struct.Struct("<Q")
CONTROL = struct.Struct("<cI")  # FORK with a socket, or KILL; number of a worker
FORK, KILL = b"f", b"k"


@dataclass(frozen=True, slots=True)
class Setup:
    """What the process knows of the models. Sent pickled, behind the import path that unpickling may need. One
    service a model.
    """

    services: tuple[tuple[Any, int, Any, Any], ...]  # card, max_seq_len, RankInfo, tokenizer
    options: WireOptions
    pictures: tuple[str, ...] = ()  # names of picture models


@dataclass(frozen=True, slots=True)
class Work:
    """One body to parse. Method and path identify the endpoint; the body follows as a message of its own."""

    endpoint: tuple[str, str]
    request: HttpRequest
    adapters: AdapterNames


class Pickler(pickle.Pickler):
    """Pickles services as names that both sides know, and leaves images that were looked at in the server."""

    def persistent_id(self, obj: Any) -> str | int | None:
        return obj.name if isinstance(obj, GenerationService) else _SIGHT if isinstance(obj, Sight) else None


class Unpickler(pickle.Unpickler):
    """Raises NotFound when a service was removed meanwhile."""

    def __init__(self, parts: Sequence[bytes], models: Models, sight: Sight | None) -> None:
        super().__init__(io.BytesIO(parts[0]), buffers=parts[1:])
        self._models, self._sight = models, sight

    def persistent_load(self, pid: Any) -> GenerationService | Sight | None:
        return self._sight if pid == _SIGHT else self._models.get(pid)


def dumped(value: Any) -> list[bytes | memoryview]:
    """The pickled value, then the files in it."""
    file, files = io.BytesIO(), list[pickle.PickleBuffer]()
    Pickler(file, pickle.HIGHEST_PROTOCOL, buffer_callback=files.append).dump(value)
    return [file.getvalue(), *(each.raw() for each in files)]


def parsed(endpoint: Endpoint, request: HttpRequest) -> Any:
    """The endpoint's result for the request, or the Look that must come first. Raises ServingError."""
    assert endpoint.parse is not None
    with seeing(request.seen), noting() as notes:
        try:
            found = endpoint.parse(request)
        except NotSeen as wanted:
            return wanted.look
    return _noted(found, tuple(notes)) if notes else found


def _noted(found: Any, notes: tuple[str, ...]) -> Any:
    if isinstance(found, JobAndMore):
        return replace(found, job=replace(found.job, notes=notes))
    return replace(found, notes=notes) if isinstance(found, Job) else found


def send_parts(sock: socket.socket, parts: Sequence[bytes | memoryview]) -> None:
    """Send the number of messages, then each of them."""
    sock.sendall(LENGTH.pack(len(parts)))
    for part in parts:
        sock.sendall(LENGTH.pack(len(part)))
        sock.sendall(part)


def receive_parts(sock: socket.socket) -> list[bytes] | None:
    """Receive what send_parts sent; None at the end. Raises TooLarge."""
    head = _read(sock, LENGTH.size)
    parts, left = list[bytes](), _MAX_REPLY_BYTES
    for number in range(0 if head is None else LENGTH.unpack(head)[0]):
        part = receive(sock, left)
        if part is None:
            return None
        parts.append(part)
        left = _MAX_FILES_BYTES if not number else left - len(part)
    return parts or None


def receive(sock: socket.socket, max_bytes: int | None = None) -> bytes | None:
    """One message behind its length; None at the end. Raises TooLarge."""
    head = _read(sock, LENGTH.size)
    if head is None:
        return None
    (length,) = LENGTH.unpack(head)
    if max_bytes is not None and length > max_bytes:
        raise TooLarge("the request holds more than this server keeps of one")
    return _read(sock, length)


def _read(sock: socket.socket, length: int) -> bytes | None:
    data = bytearray(length)
    view = memoryview(data)
    while view:
        count = sock.recv_into(view)
        if not count:
            return None
        view = view[count:]
    return bytes(data)


class _Worker:
    """A child of the process; parses one body at a time. Used by one thread at a time."""

    def __init__(self, number: int, sock: socket.socket) -> None:
        self.number, self.sock = number, sock

    def exchange(self, work: Work, models: Models) -> Any:
        """Send a body and wait for its result; blocks. Raises ServingError; EOFError when the child is gone."""
        seen = work.request.seen
        [head] = dumped(replace(work, request=replace(work.request, body=b"")))
        try:
            for part in (head, work.request.body):
                self.sock.sendall(LENGTH.pack(len(part)))
                self.sock.sendall(part)
            reply = receive_parts(self.sock)
        except OSError:
            raise EOFError from None
        if reply is None:
            raise EOFError
        is_error, value = Unpickler(reply, models, None if seen is None else seen.sight).load()
        if is_error:
            raise value
        return value

    def close(self) -> None:
        """Close the socket; a thread in `exchange` ends too."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


class _Process:
    """The process that has loaded the models' tokenizers and forks workers quickly.

    May be called from any thread except the loop's: its start takes a second, and other threads wait for it.
    """

    def __init__(self, program: Sequence[str], models: Models) -> None:
        self._program, self._models = program, models
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._num_workers = 0
        self._setup = b""  # first message to the process; made once

    def fork(self) -> _Worker:
        """Starts the process when there is none. Raises OSError."""
        ours, theirs = socket.socketpair()
        with self._lock, theirs:
            self._num_workers += 1
            message = CONTROL.pack(FORK, self._num_workers)
            try:
                socket.send_fds(self._started(), [message], [theirs.fileno()])
            except OSError:  # the process has died
                self._end()
                socket.send_fds(self._started(), [message], [theirs.fileno()])
            return _Worker(self._num_workers, ours)

    def kill(self, worker: _Worker) -> None:
        with self._lock, contextlib.suppress(OSError):
            if self._control is not None:
                self._control.send(CONTROL.pack(KILL, worker.number))

    def close(self) -> None:
        with self._lock:
            self._end()

    def start(self) -> None:
        with self._lock:
            self._started()

    def _started(self) -> socket.socket:
        if self._control is not None:
            return self._control
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [*self._program, str(theirs.fileno())]
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"}
        with theirs, signals_held_at_start():
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, env=environment, pass_fds=[theirs.fileno()], start_new_session=True
            )
        if not self._setup:
            services = ((s.card, s.engine.max_seq_len, s.engine.info, s.tokenizer) for s in self._models)
            setup = Setup(tuple(services), self._models.options, self._models.picture_names)
            self._setup = pickle.dumps((sys.path, pickle.dumps(setup)))
        assert self._process.stdin is not None
        self._process.stdin.write(self._setup)
        self._process.stdin.flush()  # it stays open: its end would end the process
        self._control = ours
        return ours

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()  # closing it ends the process and its children
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process = None


class Parsing:
    """Parses bodies for one app: `num_workers` at once, others wait (turns.py). `program` is the command of the process
    that forks workers.
    """

    def __init__(self, program: Sequence[str], models: Models, num_workers: int | None = None) -> None:
        self._models = models
        self.num_workers = num_workers or max(2, min(4, (os.cpu_count() or 1) // 2))
        self._process = _Process(program, models)
        self._turns = Turns(self.num_workers)
        self.idle: list[_Worker] = []
        self._threads = ThreadPoolExecutor(self.num_workers + 1, "parsing")
        self.num_active = self.num_bytes = 0  # bodies in other processes, or waiting for one

    def start(self) -> None:
        """Start the process in the background, so that the first large body need not wait for it."""
        with contextlib.suppress(RuntimeError):  # the server is closing
            self._threads.submit(self._process.start)

    def close(self) -> None:
        """Blocks for a moment. Bodies that are being parsed are refused."""
        self._process.close()
        for worker in self.idle:
            worker.close()
        self.idle.clear()
        self._threads.shutdown()

    async def parse(self, endpoint: Endpoint, request: HttpRequest) -> Any:
        """As `parsed`. When cancelled, its worker ends at once. Raises ServingError."""
        if request.num_bytes <= INLINE_BYTES:
            with contextlib.suppress(NotInline), inline():
                return parsed(endpoint, request)
        work = Work((endpoint.method, endpoint.path), request, self._models.adapter_names())
        with self._counted(request.num_bytes):
            is_kept = request.num_bytes <= _LARGE_BYTES
            async with self._turns.turn(request.num_bytes), self._worker(is_kept) as worker:
                try:
                    async with asyncio.timeout(_LIMIT_S):
                        return await self._in_thread(worker.exchange, work, self._models)
                except (EOFError, TimeoutError):
                    raise TooLarge("the request takes more time or memory to read than this server gives") from None

    @contextlib.contextmanager
    def _counted(self, num_bytes: int) -> Any:
        """A context that counts the body against the limits. Raises Overloaded."""
        if self.num_active >= _MAX_WAITING or (self.num_active and self.num_bytes + num_bytes > _MAX_BYTES):
            raise Overloaded("too many large requests wait to be read; try again later")
        self.num_active += 1
        self.num_bytes += num_bytes
        try:
            yield
        finally:
            self.num_active -= 1
            self.num_bytes -= num_bytes

    @asynccontextmanager
    async def _worker(self, is_kept: bool) -> AsyncIterator[_Worker]:
        """A context with a worker for one body. Afterwards the worker ends if anything went wrong, or unless
        `is_kept`.
        """
        worker = self.idle.pop() if self.idle else await self._forked()
        try:
            yield worker
        except (ServingError, NotFound) as error:
            is_kept = is_kept and not isinstance(error, TooLarge) and str(error) != BUG_TEXT
            raise
        except BaseException:
            is_kept = False
            raise
        finally:
            if is_kept:
                self.idle.append(worker)
            else:
                self._end(worker)

    async def _forked(self) -> _Worker:
        """A new worker; if the caller is cancelled, the worker ends as soon as it exists."""
        coming = self._threads.submit(self._process.fork)
        try:
            return await asyncio.wrap_future(coming)
        except asyncio.CancelledError:
            coming.add_done_callback(self._unwanted)
            raise

    def _unwanted(self, coming: Future[_Worker]) -> None:
        if not coming.cancelled() and coming.exception() is None:
            self._end(coming.result())

    def _end(self, worker: _Worker) -> None:
        worker.close()
        with contextlib.suppress(RuntimeError):  # the server is closing
            self._threads.submit(self._process.kill, worker)

    async def _in_thread(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)
