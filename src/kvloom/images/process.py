"""PictureProcess: the server's side of the process of a text-to-image model, which it starts, watches and restarts."""

import asyncio
import contextlib
import importlib.util
import itertools
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec

from kvloom.contract.errors import BadRequest, GenerationFailed, ModelError, ServingError, Unavailable
from kvloom.contract.frames import FrameBuffer, frame
from kvloom.engine.link import ranklog
from kvloom.engine.link.channel import Channel
from kvloom.engine.link.executor import RankDied
from kvloom.engine.link.starting import ended, starting
from kvloom.images.files import check_pipeline
from kvloom.images.messages import Alive, Cancel, Ended, Failed, Loaded, Paint, PipelineInfo, Ready, Report, Sent, Setup
from kvloom.processes.child import lifeline, signals_held_at_start

log = logging.getLogger(__name__)

_EXIT_S = 1.0  # seconds that the process gets to end by itself
_READ_BYTES = 1 << 16
_SILENCE_S = 120.0  # a process that sent no sign of life for so long hangs
_MAX_DELAY_S = 10.0  # longest pause between two tries to start it again
_PROGRAM = (sys.executable, "-m", "kvloom.images.main")
_LIBRARIES = ("diffusers", "transformers", "torch", "PIL")
_encode = msgspec.msgpack.Encoder().encode
_decode: Any = msgspec.msgpack.Decoder(Sent).decode


class Painter(Protocol):
    """Paints pictures. Called on the loop."""

    @property
    def info(self) -> PipelineInfo: ...
    @property
    def is_ready(self) -> bool: ...
    @property
    def num_restarts(self) -> int: ...
    def next_id(self) -> int: ...
    def check_ready(self) -> None: ...
    def paint(self, order: Paint) -> AsyncGenerator[Report]: ...


def check(path: Path) -> None:
    """Raises ModelError when the folder, or a missing package, would make the start fail."""
    check_pipeline(path)
    missing = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(f"{path} makes pictures, which takes {', '.join(missing)}: pip install 'kvloom[images]'")


class PictureProcess:
    """The constructor starts the process; `begin`, on the loop, starts watching it. It ends with this process."""

    def __init__(self, name: str, setup: Setup) -> None:
        """Waits until the model is loaded. Raises ModelError."""
        check(Path(setup.path))
        self._name, self._setup = name, setup
        self._ids = itertools.count()
        self._lock = threading.Lock()  # held while starting and closing
        self._is_closed = False
        self.is_ready = False
        self.num_restarts = 0
        self._reports: asyncio.Queue[Report | ServingError] | None = None
        self._current = -1  # the order whose reports are wanted
        self.info = self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self) -> None:
        """Accept orders from now on. Called on the loop."""
        self._task = asyncio.get_running_loop().create_task(self._watch())

    def next_id(self) -> int:
        """The id of the next order."""
        return next(self._ids)

    async def paint(self, order: Paint) -> AsyncGenerator[Report]:
        """The reports of one order; only one order at a time. Closing the generator cancels the order.

        Raises Unavailable, BadRequest, GenerationFailed.
        """
        self.check_ready()
        reports = self._reports = asyncio.Queue()
        self._current = order.id
        self._send(order)
        is_over = False
        try:
            while not is_over:
                report = await reports.get()
                is_over = isinstance(report, Ended | ServingError)
                if isinstance(report, ServingError):
                    raise report
                if isinstance(report, Ended) and report.error:
                    field = report.field
                    raise BadRequest(field, report.error) if field else GenerationFailed(report.error)
                yield report
        finally:
            self._current, self._reports = -1, None
            if not is_over:
                self._send(Cancel(order.id))

    def check_ready(self) -> None:
        """Raises Unavailable."""
        if not self.is_ready:
            raise Unavailable(f"the model {self._name} is not ready: it is starting, restarting or stopping")

    def close(self) -> None:
        """End the process, which may be loading. Safe from any thread."""
        self._is_closed, self.is_ready = True, False
        self._process.kill()
        with self._lock:
            self._end()

    # -- starting and ending, which block

    def _start(self) -> PipelineInfo:
        """Raises ModelError."""
        ours, theirs = socket.socketpair()
        level = str(ranklog.level())
        command = [*_PROGRAM, str(theirs.fileno()), level]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        with theirs, signals_held_at_start():
            try:
                self._process = subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno()],
                    stdin=lifeline(),
                    stderr=subprocess.PIPE,
                    env=environment,
                )
            except OSError as error:
                ours.close()
                raise ModelError(f"no process for {self._name} can be started: {error}") from None
        if self._is_closed:
            self._process.kill()
        assert self._process.stderr is not None
        self._log = ranklog.relay(self._process.stderr, self._name)
        self._sock = ours
        channel = Channel(ours, Loaded)
        with starting(self._setup.path, self._exit_reason, self._end):
            channel.send(self._setup)
            loaded = self._loaded(channel)
        if isinstance(loaded, Failed):
            self._end()
            raise ModelError(loaded.error)
        return loaded.info

    def _loaded(self, channel: Channel) -> Ready | Failed:
        """The first message that is no sign of life. Raises RankDied when none comes for too long."""
        try:
            while isinstance(loaded := cast(Loaded, channel.receive(_SILENCE_S)), Alive):
                pass
        except TimeoutError:
            raise RankDied(_silent()) from None
        return loaded

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        try:
            self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.join(_EXIT_S)

    def _exit_reason(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)
        return ended(self._process.returncode)

    def _restart(self) -> bool:
        """Start the process again. Returns whether it runs. Raises ModelError."""
        with self._lock:
            if self._is_closed:
                return False
            self._end()  # it may have closed its connection and still run
            self.info = self._start()
            return True

    # -- on the loop

    def _send(self, order: Paint | Cancel) -> None:
        """Never waits; messages to a process that has ended are lost."""
        if not self._writer.is_closing():
            self._writer.write(frame(_encode(order)))

    async def _watch(self) -> None:
        """Read reports; start the process again when it has died, until it is closed."""
        while True:
            reader, self._writer = await asyncio.open_connection(sock=self._sock)
            self.is_ready, hung = True, ""
            try:
                await self._read(reader)
            except TimeoutError:
                hung = _silent()
                self._process.kill()
            except (ConnectionError, msgspec.MsgspecError) as error:
                log.error("%s: its process cannot be understood: %s", self._name, error)
            self.is_ready = False
            self._writer.close()
            reason = hung or await asyncio.to_thread(self._exit_reason)
            if self._reports is not None:
                stopping = Unavailable("the server is stopping")
                self._reports.put_nowait(stopping if self._is_closed else GenerationFailed(reason))
            if self._is_closed or not await self._started_again(reason):
                return

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Deliver reports until the process ends. Raises TimeoutError when it sends no sign of life."""
        received = FrameBuffer()
        while data := await _some(reader):
            received.feed(data)
            while received.is_whole:
                sent = _decode(received.take())
                if not isinstance(sent, Alive):
                    self._deliver(sent)

    def _deliver(self, report: Report) -> None:
        """Deliver a report to its order; reports of cancelled orders are dropped."""
        if self._reports is not None and report.id == self._current:
            self._reports.put_nowait(report)

    async def _started_again(self, reason: str) -> bool:
        log.error("%s: %s; it is started again", self._name, reason)
        delay_s = 0.1
        while True:
            try:
                is_there = await asyncio.to_thread(self._restart)
            except ModelError as error:
                log.error("%s: %s", self._name, error)
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, _MAX_DELAY_S)
                continue
            self.num_restarts += is_there
            return is_there


async def _some(reader: asyncio.StreamReader) -> bytes:
    """The next bytes, none at the end. Raises TimeoutError when none come for _SILENCE_S: twice for half as long, since
    the first wait is over at once where this process was halted, maybe together with the other.
    """
    with contextlib.suppress(TimeoutError):
        return await asyncio.wait_for(reader.read(_READ_BYTES), _SILENCE_S / 2)
    return await asyncio.wait_for(reader.read(_READ_BYTES), _SILENCE_S / 2)


def _silent() -> str:
    return f"the model process gave no sign of life for {_SILENCE_S:g} s"
