"""Executors hand batches to a runner: in this process, or in a rank process of its own.

submit and collect alternate; between them the engine does other work.
"""

import contextlib
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from kvloom.engine.batch import Batch, RankInfo, Runner, StepOutput
from kvloom.engine.config import EngineConfig
from kvloom.engine.errors import ModelError

Progress = Callable[[int, int], None]  # bytes done, bytes in all


class RankDied(Exception):
    """The rank process is gone, or takes too long, or its step failed. Nothing that it knew is left."""


class Executor(Protocol):
    info: RankInfo

    @property
    def is_busy(self) -> bool:
        """A batch is submitted and not collected."""

    def submit(self, batch: Batch) -> None: ...
    def collect(self) -> StepOutput: ...
    def is_alive(self) -> bool: ...
    def restart(self) -> None: ...
    def close(self) -> None: ...


class InProcessExecutor:
    """Runs the batch at once, in the caller's thread."""

    def __init__(self, runner: Runner) -> None:
        self.info = runner.info
        self._runner = runner
        self._output: StepOutput | None = None

    @property
    def is_busy(self) -> bool:
        return self._output is not None

    def submit(self, batch: Batch) -> None:
        self._output = self._runner.run(batch)

    def collect(self) -> StepOutput:
        output, self._output = self._output, None
        assert output is not None, "collect without submit"
        return output

    def is_alive(self) -> bool:
        return True

    def restart(self) -> None:
        raise RankDied("a runner in this process cannot be restarted")

    def close(self) -> None:
        pass


class RankSetup(msgspec.Struct, array_like=True):
    """The first message to a rank."""

    config: EngineConfig
    eos_ids: list[int]


class Loading(msgspec.Struct, array_like=True, tag="loading"):
    done_bytes: int
    total_bytes: int


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    info: RankInfo


class Failed(msgspec.Struct, array_like=True, tag="failed"):
    """The model cannot be loaded, or a step raised; the rank ends after this."""

    error: str


class Done(msgspec.Struct, array_like=True, tag="done"):
    output: StepOutput


RankMessage = Loading | Ready | Failed | Done


class Channel:
    """MessagePack messages over a stream socket, each behind its length (u32, little-endian)."""

    _LENGTH = struct.Struct("<I")

    def __init__(self, sock: socket.socket, receives: Any) -> None:
        self._sock = sock
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(receives)

    def send(self, message: Any) -> None:
        body = self._encoder.encode(message)
        self._sock.sendall(self._LENGTH.pack(len(body)) + body)

    def receive(self, timeout_s: float | None = None) -> Any:
        """The next message. Raises EOFError when the other end is gone, TimeoutError when it is silent."""
        self._sock.settimeout(timeout_s)
        try:
            (length,) = self._LENGTH.unpack(self._read(self._LENGTH.size))
            return self._decoder.decode(self._read(length))
        except ConnectionError as error:
            raise EOFError(str(error)) from error
        finally:
            self._sock.settimeout(None)

    def is_readable(self) -> bool:
        return bool(select.select([self._sock], [], [], 0)[0])

    def close(self) -> None:
        self._sock.close()

    def _read(self, count: int) -> bytes:
        buffer = bytearray(count)
        view = memoryview(buffer)
        while view:
            received = self._sock.recv_into(view)
            if received == 0:
                raise EOFError("the other end closed the connection")
            view = view[received:]
        return bytes(buffer)


class RankExecutor:
    """One rank process, started here and restarted on demand. It ends when this process does: its socket closes."""

    def __init__(self, config: EngineConfig, eos_ids: list[int], progress: Progress | None = None) -> None:
        """Starts the rank and waits until its model is loaded. Raises ModelError when it cannot be."""
        self._setup = RankSetup(config, eos_ids)
        self._progress = progress
        self.is_busy = False
        self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def submit(self, batch: Batch) -> None:
        try:
            self._channel.send(batch)
        except OSError as error:
            raise RankDied(self._epitaph()) from error
        self.is_busy = True

    def collect(self) -> StepOutput:
        self.is_busy = False
        try:
            message = self._channel.receive(self._setup.config.step_timeout_s)
        except TimeoutError as error:
            raise RankDied(f"the model did not answer within {self._setup.config.step_timeout_s:g} s") from error
        except EOFError as error:
            raise RankDied(self._epitaph()) from error
        if isinstance(message, Failed):
            raise RankDied(message.error)
        assert isinstance(message, Done)
        return message.output

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def restart(self) -> None:
        """Kill what is left and load the model again. Raises ModelError or RankDied."""
        self.close()
        self._start()

    def close(self) -> None:
        self.is_busy = False
        self._channel.close()
        try:
            self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "kvloom.engine.rank", str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
        self._channel = Channel(ours, RankMessage)
        try:
            self._channel.send(self._setup)
            self.info = self._wait_ready()
        except (EOFError, OSError) as error:
            epitaph = self._epitaph()
            self.close()
            raise ModelError(f"loading {self._setup.config.model or 'the model'} failed: {epitaph}") from error
        except BaseException:
            self.close()
            raise

    def _wait_ready(self) -> RankInfo:
        while True:
            message = self._channel.receive()
            if isinstance(message, Ready):
                return message.info
            if isinstance(message, Failed):
                raise ModelError(message.error)
            if isinstance(message, Loading) and self._progress:
                self._progress(message.done_bytes, message.total_bytes)

    def _epitaph(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
        code = self._process.returncode
        if code is None:
            return "the model process closed its connection"
        return (
            f"the model process was killed by signal {-code}" if code < 0 else f"the model process exited with {code}"
        )


def restart_with_backoff(
    executor: Executor, is_closing: Callable[[], bool], sleep: Callable[[float], object] = time.sleep
) -> bool:
    """Restart until it works, waiting 0.1 s, 0.2 s, ... 10 s between tries. False when closing came first."""
    delay_s = 0.1
    while not is_closing():
        try:
            executor.restart()
            return True
        except (ModelError, RankDied):
            sleep(delay_s)
            delay_s = min(2 * delay_s, 10.0)
    return False
