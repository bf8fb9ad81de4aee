"""Executors hand batches to a runner: in this process, or in a rank process of its own.

submit and collect alternate; between them the engine does other work.
"""

import functools
import select
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import msgspec

from kvloom.engine.batch import AdapterInfo, Batch, LoadAdapter, RankInfo, Runner, StepOutput, UnloadAdapter
from kvloom.engine.config import EngineConfig
from kvloom.engine.errors import BadRequest, ModelError
from kvloom.engine.lora import FIELD
from kvloom.engine.transfers import Moves

_EXIT_S = 1.0  # what a rank gets to end by itself

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

    def load_adapter(self, id: int, path: str) -> AdapterInfo:
        """Between two steps. Waits until it is loaded; raises BadRequest, RankDied."""
        ...

    def unload_adapter(self, id: int) -> None:
        """Between two steps. Raises RankDied."""
        ...

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
        self._runner.rest()

    def collect(self) -> StepOutput:
        output, self._output = self._output, None
        assert output is not None, "collect without submit"
        return output

    def load_adapter(self, id: int, path: str) -> AdapterInfo:
        return self._runner.load_adapter(id, path)

    def unload_adapter(self, id: int) -> None:
        self._runner.unload_adapter(id)

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
    rank: int = 0
    rendezvous: str = ""  # a file where the ranks of one model meet


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


class AdapterLoaded(msgspec.Struct, array_like=True, tag="adapter"):
    info: AdapterInfo


class AdapterRefused(msgspec.Struct, array_like=True, tag="refused"):
    """As BadRequest; the rank goes on."""

    field: str
    problem: str


RankMessage = Loading | Ready | Failed | Done | AdapterLoaded | AdapterRefused


class Channel:
    """MessagePack messages over a stream socket, each behind its length (u32, little-endian)."""

    _LENGTH = struct.Struct("<I")
    _READ_BYTES = 1 << 16

    def __init__(self, sock: socket.socket, receives: Any) -> None:
        self._sock = sock
        self._encoder = msgspec.msgpack.Encoder()
        self.expect(receives)
        self._read = bytearray()  # and not yet given out

    def expect(self, receives: Any) -> None:
        """The type of the messages from now on."""
        self._decoder = msgspec.msgpack.Decoder(receives)

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: Any) -> None:
        body = self._encoder.encode(message)
        self._sock.sendall(self._LENGTH.pack(len(body)) + body)

    def receive(self, timeout_s: float | None = None) -> Any:
        """The next message. Raises EOFError when the other end is gone, TimeoutError when it is silent."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.has_message:
            if deadline is not None and not self.is_readable(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"no message within {timeout_s:g} s")
            self._fill()
        end = self._message_end()
        body = bytes(self._read[self._LENGTH.size : end])
        del self._read[:end]
        return self._decoder.decode(body)

    @property
    def has_message(self) -> bool:
        """A whole message has been read: `receive` returns at once, though the socket may have nothing to read."""
        return len(self._read) >= self._LENGTH.size and len(self._read) >= self._message_end()

    def is_readable(self, timeout_s: float | None = 0.0) -> bool:
        """Whether a message, or a part of one, or the end, is there within that time; None = wait for ever."""
        return self.has_message or bool(select.select([self._sock], [], [], timeout_s)[0])

    def close(self) -> None:
        self._sock.close()

    def _message_end(self) -> int:
        return self._LENGTH.size + int(self._LENGTH.unpack_from(self._read)[0])

    def _fill(self) -> None:
        try:
            received = self._sock.recv(self._READ_BYTES)
        except ConnectionError as error:
            raise EOFError(str(error)) from error
        if not received:
            raise EOFError("the other end closed the connection")
        self._read += received


class RankExecutor:
    """The rank processes of one model, started here and restarted together. They end when this process does.

    All ranks get every batch and choose the same tokens; rank 0's output counts. One that dies takes the others along.
    """

    def __init__(
        self, config: EngineConfig, eos_ids: Callable[[], list[int]], progress: Progress | None = None
    ) -> None:
        """Starts the ranks and waits until the model is loaded. Raises ModelError when it cannot be.

        `eos_ids` is called while they start: reading a tokenizer takes as long as importing torch.
        """
        self._config, self._eos_ids = config, functools.cache(eos_ids)
        self._progress = progress
        self.is_busy = False
        self._start()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def submit(self, batch: Batch) -> None:
        self._send(batch)
        self.is_busy = True

    def collect(self) -> StepOutput:
        self.is_busy = False
        messages = self._each_message(self._config.step_timeout_s)
        outputs = []
        for message in messages:
            assert isinstance(message, Done)
            outputs.append(message.output)
        chosen = [[(sample.id, sample.token_id) for sample in output.samples] for output in outputs]
        if any(other != chosen[0] for other in chosen[1:]):
            raise RankDied("the ranks of the model chose different tokens")
        outputs[0].moved = self._moves.merge([output.moved for output in outputs])
        outputs[0].is_tier_up = all(output.is_tier_up for output in outputs)
        return outputs[0]

    def load_adapter(self, id: int, path: str) -> AdapterInfo:
        """On every rank, or on none."""
        self._send(LoadAdapter(id, path))
        answers = self._each_message(self._config.step_timeout_s)
        refused = next((answer for answer in answers if isinstance(answer, AdapterRefused)), None)
        infos = [answer.info for answer in answers if isinstance(answer, AdapterLoaded)]
        if refused is None and all(info.digest == infos[0].digest for info in infos):
            return infos[0]
        self._send(UnloadAdapter(id))
        if refused is None:
            raise BadRequest(FIELD, "changed while the ranks read it; load it again")
        raise BadRequest(refused.field, refused.problem)

    def unload_adapter(self, id: int) -> None:
        self._send(UnloadAdapter(id))

    def is_alive(self) -> bool:
        return all(process.poll() is None for process in self._processes)

    def restart(self) -> None:
        """Kill what is left and load the model again. Raises ModelError or RankDied."""
        self.close()
        self._start()

    def close(self) -> None:
        self.is_busy = False
        for channel in self._channels:
            channel.close()
        deadline = time.monotonic() + _EXIT_S
        for process in self._processes:
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._meeting.cleanup()

    def _start(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[Channel] = []
        self._moves = Moves(self._config.world_size)
        self._meeting = tempfile.TemporaryDirectory(prefix="kvloom-ranks-")
        try:
            for _ in range(self._config.world_size):
                self._spawn()
            for rank, channel in enumerate(self._channels):
                channel.send(RankSetup(self._config, self._eos_ids(), rank, f"{self._meeting.name}/meeting"))
            self.info = self._wait_ready()
        except (RankDied, OSError) as error:
            epitaph = str(error) if isinstance(error, RankDied) else self._epitaph()
            self.close()
            raise ModelError(f"loading {self._config.model or 'the model'} failed: {epitaph}") from error
        except BaseException:
            self.close()
            raise

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "kvloom.engine.rank", str(theirs.fileno()), self._config.backend]
            process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
        self._processes.append(process)
        self._channels.append(Channel(ours, RankMessage))

    def _send(self, order: Batch | LoadAdapter | UnloadAdapter) -> None:
        """To every rank. Raises RankDied."""
        try:
            for channel in self._channels:
                channel.send(order)
        except OSError as error:
            raise RankDied(self._epitaph()) from error

    def _wait_ready(self) -> RankInfo:
        """What rank 0 says; its progress counts for all. Raises ModelError, RankDied."""
        infos: dict[int, RankInfo] = {}
        while len(infos) < len(self._channels):
            waiting = [channel for rank, channel in enumerate(self._channels) if rank not in infos]
            for rank, message in self._readable(waiting, None):
                if isinstance(message, Ready):
                    infos[rank] = message.info
                elif isinstance(message, Failed):
                    raise ModelError(message.error)
                elif isinstance(message, Loading) and self._progress and rank == 0:
                    self._progress(message.done_bytes, message.total_bytes)
        return infos[0]

    def _each_message(self, timeout_s: float) -> list[Any]:
        """One message of every rank, in their order. Raises RankDied as soon as one is gone or has failed."""
        found: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while len(found) < len(self._channels):
            waiting = [channel for rank, channel in enumerate(self._channels) if rank not in found]
            for rank, message in self._readable(waiting, max(0.0, deadline - time.monotonic())):
                if isinstance(message, Failed):
                    raise RankDied(message.error)
                found[rank] = message
        return [found[rank] for rank in range(len(self._channels))]

    def _readable(self, waiting: Sequence[Channel], timeout_s: float | None) -> Iterator[tuple[int, Any]]:
        """(rank, message) of those that have something to say. Raises RankDied."""
        ready = [channel for channel in waiting if channel.has_message] or select.select(waiting, [], [], timeout_s)[0]
        if not ready:
            raise RankDied(f"the model did not answer within {self._config.step_timeout_s:g} s")
        for channel in ready:
            try:
                yield self._channels.index(channel), channel.receive(timeout_s)
            except TimeoutError as error:
                raise RankDied(f"the model did not answer within {self._config.step_timeout_s:g} s") from error
            except EOFError as error:
                raise RankDied(self._epitaph()) from error

    def _epitaph(self) -> str:
        """How the first rank that ended came to it."""
        deadline = time.monotonic() + _EXIT_S
        while all(process.poll() is None for process in self._processes) and time.monotonic() < deadline:
            time.sleep(0.01)
        code = next((process.returncode for process in self._processes if process.returncode is not None), None)
        if code is None:
            return "the model process closed its connection"
        return (
            f"the model process was killed by signal {-code}" if code < 0 else f"the model process exited with {code}"
        )


def restart_with_backoff(
    restart: Callable[[], object], is_closing: Callable[[], bool], sleep: Callable[[float], object] = time.sleep
) -> bool:
    """Restart until it works, waiting 0.1 s, 0.2 s, ... 10 s between tries. False when closing came first."""
    delay_s = 0.1
    while not is_closing():
        try:
            restart()
            return True
        except (ModelError, RankDied):
            sleep(delay_s)
            delay_s = min(2 * delay_s, 10.0)
    return False
