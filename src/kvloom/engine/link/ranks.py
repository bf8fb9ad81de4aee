"""RankExecutor: the rank processes of one model, started, watched and restarted."""

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from kvloom.checkpoints.lora import FIELD
from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import BadRequest, ModelError
from kvloom.contract.lifecycle import Failed, Loading, Ready
from kvloom.contract.messages import (
    AdapterInfo,
    AdapterLoaded,
    AdapterRefused,
    Batch,
    Done,
    LoadAdapter,
    Progress,
    RankInfo,
    RankMessage,
    RankSetup,
    StepOutput,
    UnloadAdapter,
)
from kvloom.engine.link.executor import RankDied, max_submitted
from kvloom.engine.link.rankargs import RankArguments
from kvloom.engine.schedule.transfers import Moves
from kvloom.processes.channel import Channel, ready_of
from kvloom.processes.child import Child, Kind, ended, starting

_EXIT_S = 1.0  # seconds that a rank which is just ending gets until its end is told


class RankExecutor:
    """The rank processes of one model, started and restarted together. They end when this process does.

    All ranks get every batch and choose the same tokens; rank 0's output is used. When one dies the others are
    restarted too.
    """

    def __init__(
        self,
        kind: Kind,
        config: EngineConfig,
        eos_ids: Callable[[], list[int]],
        progress: Progress | None = None,
    ) -> None:
        """Starts the ranks and waits until the model is loaded. Raises ModelError when it cannot be.

        `eos_ids` is called while the ranks start, because reading a tokenizer takes as long as their imports.
        """
        self._kind = kind
        self._config, self._eos_ids = config, functools.cache(eos_ids)
        self._progress = progress
        self.max_submitted = max_submitted(config)
        self._start()

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [rank.pid for rank in self._ranks]

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
        return all(rank.exit_code is None for rank in self._ranks)

    def restart(self) -> None:
        """Kill what is left and load the model again. Raises ModelError or RankDied."""
        self.kill()
        self.close()
        self._start(self._kind.silence_s)

    def nudge(self) -> None:
        """Does nothing: a caller never waits for ranks longer than a step."""

    def kill(self) -> None:
        """See Executor. Does not wait for the processes."""
        for rank in list(self._ranks):
            rank.kill()

    def close(self) -> None:
        """End the processes: close their sockets, and kill them after a second."""
        for channel in self._channels:
            channel.close()
        for rank in self._ranks:
            rank.end()

    def _start(self, silence_s: float | None = None) -> None:
        """Start the ranks. `silence_s`: how long they may send nothing meanwhile; None = for ever, as at the first
        start, which may compile and has people who watch it.
        """
        self._ranks: list[Child] = []
        self._channels: list[Channel] = []
        self._moves = Moves(self._config.world_size)
        with starting(self._config.model, self._exit_reason, self.close):
            with _meeting_place() as place:
                for _ in range(self._config.world_size):
                    self._spawn(place)
            for rank, channel in enumerate(self._channels):
                channel.send(RankSetup(self._config, self._eos_ids(), rank, f"/proc/self/fd/{place}"))
            self.info = self._wait_ready(silence_s)

    def _spawn(self, place: int) -> None:
        number, config = len(self._ranks), self._config
        device = config.device_ids[number] if config.device_ids else number
        given = RankArguments(number, config.world_size, device, config.backend == "fake", 0, 0)

        def words(socket: int, level: int) -> Sequence[str]:
            return replace(given, socket=socket, level=level).argv()

        rank = Child(self._kind, f"rank {number}", words, (place,))
        self._ranks.append(rank)
        self._channels.append(Channel(rank.sock, RankMessage))

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
        silent = self._kind.silent
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
            parts = "blocks, tokens, bytes, host blocks, states or blocks of windows"
            raise ModelError(f"the ranks' KV caches differ in {parts}: {shapes}")
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
        while self.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        codes = (rank.exit_code for rank in self._ranks)
        return ended(self._kind.people, next((code for code in codes if code is not None), None))


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
