"""Where bodies are parsed: small ones on the loop; large ones, and grammars, in another process.

Decoding, chat templates, tokenising and compiling grammars hold the interpreter lock for a time that grows with the
body. Another process cannot block the loop, can be killed at any moment, and is certain to give its memory back. Its
side is parse_process.py.
"""

import asyncio
import contextlib
import functools
import io
import os
import pickle
import socket
import struct
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from kvloom.contract.errors import NotFound, Overloaded, ServingError
from kvloom.contract.images import Sight
from kvloom.processes import kinds
from kvloom.processes.channel import FrameTooLong, receive_frame, send_frames
from kvloom.processes.child import Child, Template
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
_SIGHT = 0  # stands for images that stay in the server
_COUNT = struct.Struct("<I")


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
    """Send the number of frames, and each of them."""
    send_frames(sock, [_COUNT.pack(len(parts)), *parts])


def receive_parts(sock: socket.socket) -> list[bytes] | None:
    """Receive what send_parts sent; None at the end. Raises TooLarge."""
    count = receive_frame(sock)
    parts, left = list[bytes](), _MAX_REPLY_BYTES
    try:
        for number in range(0 if count is None else _COUNT.unpack(count)[0]):
            part = receive_frame(sock, left)
            if part is None:
                return None
            parts.append(part)
            left = _MAX_FILES_BYTES if not number else left - len(part)
    except FrameTooLong:
        raise TooLarge("the request holds more than this server keeps of one") from None
    return parts or None


def exchange(worker: Child, work: Work, models: Models) -> Any:
    """Send a body to a worker, which no other thread uses, and wait for its result; blocks. Raises ServingError;
    EOFError when the worker is gone.
    """
    seen = work.request.seen
    [head] = dumped(replace(work, request=replace(work.request, body=b"")))
    try:
        send_frames(worker.sock, [head, work.request.body])
        reply = receive_parts(worker.sock)
    except OSError:
        raise EOFError from None
    if reply is None:
        raise EOFError
    is_error, value = Unpickler(reply, models, None if seen is None else seen.sight).load()
    if is_error:
        raise value
    return value


def _starter(models: Models) -> Callable[[], Child]:
    """Starts the process that has loaded the models' tokenizers and forks workers."""

    @functools.cache
    def setup() -> bytes:
        services = ((s.card, s.engine.max_seq_len, s.engine.info, s.tokenizer) for s in models)
        told = Setup(tuple(services), models.options, models.picture_names)
        return pickle.dumps((sys.path, pickle.dumps(told)))

    def start() -> Child:
        with open(os.memfd_create("kvloom-parsers"), "wb", buffering=0) as file:
            file.write(setup())
            number = file.fileno()
            return Child(kinds.PARSERS, "parsers", lambda *usual: [*map(str, usual), str(number)], [number])

    return start


class Parsing:
    """Parses bodies for one app: `num_workers` at once, others wait (turns.py)."""

    def __init__(self, models: Models, num_workers: int | None = None) -> None:
        self._models = models
        self.num_workers = num_workers or max(2, min(4, (os.cpu_count() or 1) // 2))
        self._template = Template(_starter(models))
        self._turns = Turns(self.num_workers)
        self.idle: list[Child] = []
        self._threads = ThreadPoolExecutor(self.num_workers + 1, "parsing")
        self.num_active = self.num_bytes = 0  # bodies in other processes, or waiting for one

    def start(self) -> None:
        """Start the process in the background, so that the first large body need not wait for it."""
        with contextlib.suppress(RuntimeError):  # the server is closing
            self._threads.submit(self._template.start)

    def close(self) -> None:
        """Blocks for a moment. Bodies that are being parsed are refused."""
        self._template.close()
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
                    async with asyncio.timeout(worker.kind.silence_s):
                        return await self._in_thread(exchange, worker, work, self._models)
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
    async def _worker(self, is_kept: bool) -> AsyncIterator[Child]:
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

    async def _forked(self) -> Child:
        """A new worker; if the caller is cancelled, the worker ends as soon as it exists."""
        coming = self._threads.submit(Child, kinds.PARSER, "parser", template=self._template)
        try:
            return await asyncio.wrap_future(coming)
        except asyncio.CancelledError:
            coming.add_done_callback(self._unwanted)
            raise

    def _unwanted(self, coming: Future[Child]) -> None:
        if not coming.cancelled() and coming.exception() is None:
            self._end(coming.result())

    def _end(self, worker: Child) -> None:
        """A thread in `exchange` ends too."""
        worker.kill()
        try:
            self._threads.submit(worker.close)
        except RuntimeError:  # the server is closing
            worker.close()

    async def _in_thread(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)
