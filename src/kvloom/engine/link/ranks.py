"""RankExecutor: the rank processes of one model, started, watched and restarted."""

import contextlib
import functools
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvloom.checkpoints.lora import FIELD
from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import BadRequest, ModelError
from kvloom.contract.messages import (
    AdapterInfo,
    AdapterLoaded,
    AdapterRefused,
    Batch,
    Done,
    Failed,
    LoadAdapter,
    Loading,
    Progress,
    RankInfo,
    RankMessage,
    RankSetup,
    Ready,
    StepOutput,
    UnloadAdapter,
)
from kvloom.engine.link import ranklog
from kvloom.engine.link.channel import Channel, ready_of
from kvloom.engine.link.executor import RankDied, max_submitted
from kvloom.engine.link.rankargs import RankArguments
from kvloom.engine.link.starting import ended, starting
from kvloom.engine.schedule.transfers import Moves
from kvloom.processes.child import lifeline, signals_held_at_start

_EXIT_S = 1.0  # seconds that a rank gets to end by itself
_SILENCE_S = 300.0  # seconds without a sign of life after which a rank that is loaded again is given up


class RankExecutor:
    """The rank processes of one model, started and restarted together. They end when this process does.

    All ranks get every batch and choose the same tokens; rank 0's output is used. When one dies the others are
    restarted too.
    """

    def __init__(
        self,
        program: Sequence[str],
        config: EngineConfig,
        eos_ids: Callable[[], list[int]],
        progress: Progress | None = None,
    ) -> None:
        """Starts the ranks and waits until the model is loaded. Raises ModelError when it cannot be.

        `program`: the command line of a rank, to which the arguments of rankargs.py are appended. `eos_ids` is called
        while the ranks start, because reading a tokenizer takes as long as their imports.
        """
        self._program = program
        self._config, self._eos_ids = config, functools.cache(eos_ids)
        self._progress = progress
        self.max_submitted = max_submitted(config)
        self._start()

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [process.pid for process in self._processes]

    def submit(self, batch: Batch) -> None:
        """See Executor. Sends the batch to every rank."""
        self._send(batch)

    def collect(self) -> StepOutput:
        """See Executor. Returns rank 0's output; raises RankDied also when the ranks chose different tokens."""
        messages = self._each_message(self._config.step_timeout_s)
        outputs = []
        for message in messages:
            assert isinstance(message, Done)
            outputs.append(message.output)
        chosen = [[(sample.id, sample.token_id) for sample in output.samples] or output.tokens for output in outputs]
        if any(other != chosen[0] for other in chosen[1:]):
            raise RankDied("the ranks of the model chose different tokens")
        outputs[0].moved = self._moves.merge([output.moved for output in outputs])
        outputs[0].is_tier_up = all(output.is_tier_up for output in outputs)
        return outputs[0]

    def load_adapter(self, id: int, path: str) -> AdapterInfo:
        """See Executor. When one rank refuses it, all others drop it again."""
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
        """See Executor. On every rank."""
        self._send(UnloadAdapter(id))

    def is_alive(self) -> bool:
        """Whether every process runs."""
        return all(process.poll() is None for process in self._processes)

    def restart(self) -> None:
        """Kill what is left and load the model again. Raises ModelError or RankDied."""
        self.kill()
        self.close()
        self._start(_SILENCE_S)

    def nudge(self) -> None:
        """Does nothing: a caller never waits for ranks longer than a step."""

    def kill(self) -> None:
        """See Executor. Does not wait for the processes."""
        for process in list(self._processes):
            process.kill()

    def close(self) -> None:
        """End the processes: close their sockets, and kill them after a second."""
        for channel in self._channels:
            channel.close()
        deadline = time.monotonic() + _EXIT_S
        for process in self._processes:
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for log in self._logs:
            log.join(_EXIT_S)

    def _start(self, silence_s: float | None = None) -> None:
        """Start the ranks. `silence_s`: how long they may send nothing meanwhile; None = for ever, as at the first
        start, which may compile and has people who watch it.
        """
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[Channel] = []
        self._logs: list[threading.Thread] = []
        self._moves = Moves(self._config.world_size)
        with starting(self._config.model, self._exit_reason, self.close):
            with _meeting_place() as place:
                for _ in range(self._config.world_size):
                    self._spawn(place)
            for rank, channel in enumerate(self._channels):
                channel.send(RankSetup(self._config, self._eos_ids(), rank, f"/proc/self/fd/{place}"))
            self.info = self._wait_ready(silence_s)

    def _spawn(self, place: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            rank, config = len(self._processes), self._config
            device = config.device_ids[rank] if config.device_ids else rank
            is_mock, level = config.backend == "fake", ranklog.level()
            given = RankArguments(rank, config.world_size, device, is_mock, theirs.fileno(), level)
            command = [*self._program, *given.argv()]
            with signals_held_at_start():
                process = subprocess.Popen(
                    command, pass_fds=(theirs.fileno(), place), stdin=lifeline(), stderr=subprocess.PIPE
                )
        assert process.stderr is not None
        self._logs.append(ranklog.relay(process.stderr, f"rank {rank}"))
        self._processes.append(process)
        self._channels.append(Channel(ours, RankMessage))

    def _send(self, order: Batch | LoadAdapter | UnloadAdapter) -> None:
        """Send a message to every rank. Raises RankDied."""
        try:
            for channel in self._channels:
                channel.send(order, self._config.step_timeout_s)
        except TimeoutError as error:
            raise RankDied(self._no_answer) from error
        except OSError as error:
            raise RankDied(self._last_words() or self._exit_reason()) from error

    def _last_words(self) -> str:
        """The failure that a rank reported before it ended; "" = none."""
        for channel in self._channels:
            with contextlib.suppress(EOFError, TimeoutError):
                while True:
                    message = channel.receive(0.0)
                    if isinstance(message, Failed):
                        return message.error
        return ""

    def _wait_ready(self, silence_s: float | None) -> RankInfo:
        """RankInfo of rank 0; progress of rank 0 is reported for all. Raises ModelError (also when ranks differ) and
        RankDied.
        """
        infos: dict[int, RankInfo] = {}
        silent = f"the model gave no sign of life for {silence_s or 0:g} s"
        while len(infos) < len(self._channels):
            waiting = [channel for rank, channel in enumerate(self._channels) if rank not in infos]
            for rank, message in self._readable(waiting, silence_s, silent):
                if isinstance(message, Ready):
                    infos[rank] = message.info
                elif isinstance(message, Failed):
                    raise ModelError(message.error)
                elif isinstance(message, Loading) and self._progress and rank == 0:
                    self._progress(message.done_bytes, message.total_bytes)
        if any(info.cache_shape != infos[0].cache_shape for info in infos.values()):
            shapes = "; ".join(str(list(infos[rank].cache_shape)) for rank in sorted(infos))
            raise ModelError(f"the ranks' KV caches differ in blocks, tokens, bytes, host blocks or states: {shapes}")
        return infos[0]

    def _each_message(self, timeout_s: float) -> list[Any]:
        """One message from each rank, in rank order. Raises RankDied as soon as one is gone or has failed."""
        found: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while len(found) < len(self._channels):
            waiting = [channel for rank, channel in enumerate(self._channels) if rank not in found]
            for rank, message in self._readable(waiting, max(0.0, deadline - time.monotonic())):
                if isinstance(message, Failed):
                    raise RankDied(message.error)
                found[rank] = message
        return [found[rank] for rank in range(len(self._channels))]

    def _readable(
        self, waiting: Sequence[Channel], timeout_s: float | None, why: str = ""
    ) -> Iterator[tuple[int, Any]]:
        """(rank, message) of the ranks that have a message. Raises RankDied; `why`: what it says of silence."""
        ready = [channel for channel in waiting if channel.has_message] or ready_of(waiting, timeout_s)
        if not ready:
            raise RankDied(why or self._no_answer)
        for channel in ready:
            try:
                yield self._channels.index(channel), channel.receive(timeout_s)
            except TimeoutError as error:
                raise RankDied(why or self._no_answer) from error
            except EOFError as error:
                raise RankDied(self._exit_reason()) from error

    @property
    def _no_answer(self) -> str:
        return f"the model did not answer within {self._config.step_timeout_s:g} s"

    def _exit_reason(self) -> str:
        """How the first dead rank ended, for people. Waits up to a second for one that is just ending."""
        deadline = time.monotonic() + _EXIT_S
        while all(process.poll() is None for process in self._processes) and time.monotonic() < deadline:
            time.sleep(0.01)
        return ended(next((process.returncode for process in self._processes if process.returncode is not None), None))


@contextlib.contextmanager
def _meeting_place() -> Iterator[int]:
    """A file where the ranks of one model meet, open for those that inherit it. It has no name, so that nothing of it
    stays behind, however its processes end.
    """
    place = os.memfd_create("kvloom-ranks")
    try:
        yield place
    finally:
        os.close(place)
