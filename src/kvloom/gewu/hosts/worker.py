"""WorkerHost: the daemon's side of a worker process, which holds one model."""

import asyncio
import contextlib
import socket
import sys
from typing import Any, Self

import msgspec

from kvloom.contract.errors import ModelError
from kvloom.contract.frames import FrameBuffer, frame
from kvloom.gewu.modelfiles import ModelFiles
from kvloom.gewu.protocol.messages import (
    Events,
    Failed,
    Held,
    Host,
    Listeners,
    Loading,
    Open,
    Order,
    Ping,
    Pong,
    Ready,
    Report,
)
from kvloom.processes.child import lifeline

_CLOSE_S = 1.0
_START_FACTOR = 4  # the engine's libraries are imported before its first message
_READ_BYTES = 1 << 16
_encode = msgspec.msgpack.Encoder().encode
_decode: Any = msgspec.msgpack.Decoder(Report).decode


class WorkerProcess:
    """A worker, and the daemon's end of its socket."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader, self._writer = reader, writer
        self._received = FrameBuffer()

    @classmethod
    async def start(cls, model_fds: list[int]) -> Self:
        """A worker that inherits `model_fds` and waits for its Open. Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "kvloom.gewu.worker.main", str(theirs.fileno())]
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    pass_fds=(theirs.fileno(), *model_fds),
                    stdin=lifeline(),
                    process_group=0,  # Ctrl-C is for the daemon
                )
            except OSError:
                ours.close()
                raise
        return cls(process, *await asyncio.open_connection(sock=ours))

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the signal's number when a signal ended it."""
        return self._process.returncode

    def send(self, message: Open | Order) -> None:
        """Never waits; messages to a process that has ended are lost."""
        if not self._writer.is_closing():
            self._writer.write(frame(_encode(message)))

    async def receive(self) -> Report:
        """The next report. Raises EOFError when there will be no more."""
        while not self._received.is_whole:
            try:
                data = await self._reader.read(_READ_BYTES)
            except ConnectionError as error:
                raise EOFError(str(error)) from error
            if not data:
                raise EOFError("the worker closed its connection")
            self._received.feed(data)
        report: Report = _decode(self._received.take())
        return report

    def kill(self) -> None:
        """Kill it at once; `end` must still be awaited."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def end(self) -> None:
        """Close the socket, which ends a worker between two steps; kill it if it does not end."""
        self._writer.close()
        try:
            await asyncio.wait_for(self._process.wait(), _CLOSE_S)
        except TimeoutError:
            self.kill()
            await self._process.wait()


class WorkerHost:
    """Implements Host."""

    def __init__(self, worker: WorkerProcess, info: Ready, silence_s: float, on: Listeners) -> None:
        """Ends the process when it answers nothing for `silence_s`."""
        self.info = info
        self._max_silence_s = silence_s
        self._silence_s: float | None = None  # seconds of silence since an unanswered ping; None = no ping is open
        self.pid: int | None = worker.pid
        self.held_tokens: dict[str, int] = {}
        self._worker = worker
        self._task = asyncio.get_running_loop().create_task(self._read(on))

    def send(self, order: Order) -> None:
        self._worker.send(order)

    def watch(self, interval_s: float) -> None:
        """See Host. Time is counted in calls, so that a pause of the daemon itself makes no worker look silent."""
        if self._silence_s is None:
            self._silence_s = 0.0
            self.send(Ping())
            return
        self._silence_s += interval_s
        if self._silence_s >= self._max_silence_s:
            self._worker.kill()

    async def close(self) -> None:
        """End it; afterwards its memory is free."""
        self._task.cancel()
        await self._worker.end()

    async def _read(self, on: Listeners) -> None:
        why = "the model process has ended"
        try:
            while True:
                report = await self._worker.receive()
                self._silence_s = None if isinstance(report, Pong) or self._silence_s is None else 0.0
                if isinstance(report, Events):
                    on.events(report.events)
                elif isinstance(report, Held):
                    self.held_tokens = report.tokens
                elif isinstance(report, Failed):
                    why = report.error
        except EOFError:
            await self._worker.end()
            if self._silence_s is not None and self._silence_s >= self._max_silence_s:
                why = f"the model process gave no sign of life for {self._max_silence_s:g} s"
            on.death(why)


class WorkerOpener:
    """Implements Opener. A process that sends nothing for `silence_s` is ended."""

    has_processes = True

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s

    async def __call__(self, setup: Open, files: ModelFiles, on: Listeners) -> Host:
        """Start a worker and wait until its model is loaded."""
        try:
            with files.lay_out() as path:
                return await self._open(msgspec.structs.replace(setup, model=path), files, on)
        except OSError as error:
            raise ModelError(f"no process for the model can be started: {error}") from None

    async def _open(self, setup: Open, files: ModelFiles, on: Listeners) -> Host:
        worker = await WorkerProcess.start(list(files.fds.values()))
        try:
            worker.send(setup)
            report = await self._loaded(worker)
        except TimeoutError:
            worker.kill()
            await worker.end()
            raise ModelError("the model process gave no sign of life while it loaded the model") from None
        except EOFError:
            await worker.end()
            raise ModelError(f"the model process ended with {worker.exit_code} while it loaded the model") from None
        except BaseException:
            await worker.end()
            raise
        if isinstance(report, Ready):
            return WorkerHost(worker, report, self._silence_s, on)
        await worker.end()
        why = report.error if isinstance(report, Failed) else "the model process broke the protocol"
        raise ModelError(why.replace(setup.model, files.path))

    async def _loaded(self, worker: WorkerProcess) -> Report:
        """The first report that is not Loading. Raises TimeoutError, EOFError."""
        limit_s = self._silence_s * _START_FACTOR
        while True:
            report = await asyncio.wait_for(worker.receive(), limit_s)
            if not isinstance(report, Loading):
                return report
            limit_s = self._silence_s
