"""WorkerHost: the daemon's end of a worker process, which holds one model."""

import asyncio
import contextlib
import socket
import struct
import sys
from typing import Any

import msgspec

from kvloom.engine.errors import ModelError
from kvloom.gewu.messages import Events, Failed, Held, Host, OnDeath, OnEvents, Open, Order, Ready, Report

_LENGTH = struct.Struct("<I")
_CLOSE_S = 1.0
_encode = msgspec.msgpack.Encoder().encode
_decode: Any = msgspec.msgpack.Decoder(Report).decode


class WorkerHost:
    """Implements Host."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        info: Ready,
        on_events: OnEvents,
        on_death: OnDeath,
    ) -> None:
        self.info = info
        self.pid: int | None = process.pid
        self.held_tokens: dict[str, int] = {}
        self._process = process
        self._writer = writer
        self._task = asyncio.get_running_loop().create_task(self._read(reader, on_events, on_death))

    def send(self, order: Order) -> None:
        if not self._writer.is_closing():
            _write(self._writer, order)

    async def close(self) -> None:
        """End the process; when this returns its memory is free."""
        self._task.cancel()
        await _end(self._process, self._writer)

    async def _read(self, reader: asyncio.StreamReader, on_events: OnEvents, on_death: OnDeath) -> None:
        why = "the model process has ended"
        try:
            while True:
                report = await _receive(reader)
                if isinstance(report, Events):
                    on_events(report.events)
                elif isinstance(report, Held):
                    self.held_tokens = report.tokens
                elif isinstance(report, Failed):
                    why = report.error
        except (asyncio.IncompleteReadError, ConnectionError):
            await _end(self._process, self._writer)
            on_death(why)


async def open_worker(setup: Open, model_fd: int, on_events: OnEvents, on_death: OnDeath) -> Host:
    """Implements Opener: start a worker and wait until its model is loaded."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "kvloom.gewu.worker",
            str(theirs.fileno()),
            pass_fds=(theirs.fileno(), model_fd),
            stdin=asyncio.subprocess.DEVNULL,
        )
    reader, writer = await asyncio.open_connection(sock=ours)
    try:
        _write(writer, setup)
        report = await _receive(reader)
    except (asyncio.IncompleteReadError, ConnectionError):
        await _end(process, writer)
        raise ModelError(f"the model process ended with {process.returncode} while it loaded the model") from None
    except BaseException:
        await _end(process, writer)
        raise
    if isinstance(report, Ready):
        return WorkerHost(process, reader, writer, report, on_events, on_death)
    await _end(process, writer)
    raise ModelError(report.error if isinstance(report, Failed) else "the model process broke the protocol")


async def _receive(reader: asyncio.StreamReader) -> Report:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    report: Report = _decode(await reader.readexactly(length))
    return report


def _write(writer: asyncio.StreamWriter, message: Open | Order) -> None:
    body = _encode(message)
    writer.write(_LENGTH.pack(len(body)) + body)


async def _end(process: asyncio.subprocess.Process, writer: asyncio.StreamWriter) -> None:
    """Close the socket, which ends a worker between two steps; kill one that does not listen."""
    writer.close()
    try:
        await asyncio.wait_for(process.wait(), _CLOSE_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
