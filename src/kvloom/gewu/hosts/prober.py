"""Prober: the daemon's side of the process that examines model files. One model at a time, each for a limited time."""

import asyncio
import contextlib
import os
import socket

import msgspec

from kvloom.gewu.codes import Code, Refused
from kvloom.gewu.descriptors import is_spare
from kvloom.gewu.modelfiles import MAX_FILES, ModelFiles
from kvloom.gewu.prober.main import MAX_MESSAGE_BYTES, Answer, Question
from kvloom.gewu.prober.probe import Found
from kvloom.processes import kinds
from kvloom.processes.child import Child

_START_S = 30.0
_Packet = tuple[bytes, list[int]]


class Prober:
    """Starts the process on demand, and again after it has died or was killed."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._lock = asyncio.Lock()
        self._child: Child | None = None

    @property
    def pids(self) -> list[int]:
        """Of the process, when there is one."""
        return [] if self._child is None else [self._child.pid]

    async def look(self, fd: int, pid: int) -> tuple[Found, ModelFiles]:
        """Examine the descriptor that process `pid` passed; the files in the answer are the caller's. Raises
        Refused.
        """
        async with self._lock:
            try:
                data, fds = await self._ask(fd, pid)
            except OSError:  # it may have been killed long ago, when it looked at nothing
                data, fds = await self._ask_another(fd, pid)
        answer = msgspec.msgpack.decode(data, type=Answer)
        if answer.found is not None and len(fds) == len(answer.names) and not any(map(is_spare, fds)):
            names = map(os.fsdecode, answer.names)
            return answer.found, ModelFiles(answer.found.path, dict(zip(names, fds, strict=True)))
        for opened in fds:
            os.close(opened)
        if answer.found is None:
            raise Refused(answer.code, answer.reason)
        raise Refused(Code.NOMEM, "the service is out of descriptors")

    async def _ask(self, fd: int, pid: int) -> _Packet:
        """The process's answer. Raises Refused when there is none in time, OSError when the process has died."""
        child, limit_s = self._child or await self._start(), kinds.PROBER.silence_s  # a model takes about a millisecond
        try:
            socket.send_fds(child.sock, [msgspec.msgpack.encode(Question(pid, self._backend))], [fd])
            return await _receive(child.sock, limit_s)
        except TimeoutError:
            await self.close()
            raise Refused(Code.FAULT, f"the model could not be looked at within {limit_s:g} s") from None
        except OSError:
            await self.close()
            raise

    async def _ask_another(self, fd: int, pid: int) -> _Packet:
        """The answer of a new process. Raises Refused."""
        try:
            return await self._ask(fd, pid)
        except OSError:
            raise Refused(Code.FAULT, "the process that looked at the model has died of it") from None

    async def start(self) -> None:
        """Start the process before the first question."""
        async with self._lock:
            if self._child is None:
                with contextlib.suppress(Refused):  # the question will report it
                    await self._start()

    async def close(self) -> None:
        """End the process; the next question starts another one."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.sock.close()
            await asyncio.to_thread(child.reason)  # not for long: a dead file system may block it

    async def _start(self) -> Child:
        """Raises Refused."""
        try:
            self._child = child = Child(kinds.PROBER, "prober")
            child.sock.setblocking(False)
            await _receive(child.sock, _START_S)
        except OSError as error:
            await self.close()
            raise Refused(Code.NOMEM, f"the process that looks at models cannot be started: {error}") from None
        return child


async def _receive(sock: socket.socket, limit_s: float) -> _Packet:
    """The next packet. Raises TimeoutError, OSError."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_Packet] = loop.create_future()

    def read() -> None:
        loop.remove_reader(sock)
        if future.done():  # given up, just before: the socket is closed with what comes
            return
        try:
            data, fds, _, _ = socket.recv_fds(sock, MAX_MESSAGE_BYTES, MAX_FILES, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            future.set_exception(error)
        else:
            if data:
                future.set_result((data, list(fds)))
            else:
                future.set_exception(ConnectionResetError())

    loop.add_reader(sock, read)
    try:
        return await asyncio.wait_for(future, limit_s)
    finally:
        loop.remove_reader(sock)
