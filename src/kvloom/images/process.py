"""PictureProcess: the server's side of the process of a text-to-image model, which it starts, watches and restarts."""

import asyncio
import importlib.util
import itertools
import logging
import threading
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Protocol

import msgspec

from kvloom.contract.errors import BadRequest, GenerationFailed, ModelError, ServingError, Unavailable
from kvloom.contract.lifecycle import Failed, Pong, Ready
from kvloom.images.files import check_pipeline
from kvloom.images.messages import Cancel, Ended, Loaded, Paint, PipelineInfo, Report, Sent, Setup
from kvloom.processes import kinds
from kvloom.processes.channel import Channel
from kvloom.processes.child import Child, Died, Kind, starting
from kvloom.processes.keeper import Keeper
from kvloom.processes.loop_channel import LoopChannel

log = logging.getLogger(__name__)

_LIBRARIES = ("diffusers", "transformers", "torch", "PIL")


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

    def __init__(self, name: str, setup: Setup, kind: Kind = kinds.PAINTER) -> None:
        """Waits until the model is loaded. Raises ModelError."""
        check(Path(setup.path))
        self._name, self._setup, self.kind = name, setup, kind
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
        return self._child.pid

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
        self._channel.send(order)
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
                self._channel.send(Cancel(order.id))

    def check_ready(self) -> None:
        """Raises Unavailable."""
        if not self.is_ready:
            raise Unavailable(f"the model {self._name} is not ready: it is starting, restarting or stopping")

    def close(self) -> None:
        """End the process, which may be loading. Safe from any thread."""
        self._is_closed, self.is_ready = True, False
        self._child.kill()
        with self._lock:
            self._child.close()

    # -- starting and ending, which block

    def _start(self) -> PipelineInfo:
        """Raises ModelError."""
        try:
            self._child = child = Child(self.kind, self._name)
        except OSError as error:
            raise ModelError(f"no process for {self._name} can be started: {error}") from None
        if self._is_closed:
            child.kill()
        channel = Channel(child.sock, Loaded)
        with starting(self._setup.path, child.reason, child.close):
            channel.send(self._setup)
            loaded = self._loaded(channel)
        if isinstance(loaded, Failed):
            child.close()
            raise ModelError(loaded.error)
        return loaded.info

    def _loaded(self, channel: Channel) -> Ready[PipelineInfo] | Failed:
        """The first message that is no sign of life. Raises Died when none comes for too long."""
        try:
            while True:
                loaded: Loaded = channel.receive(self.kind.silence_s)
                if not isinstance(loaded, Pong):
                    return loaded
        except TimeoutError:
            raise Died(self.kind.silent) from None

    def _restart(self) -> bool:
        """Start the process again. Returns whether it runs. Raises ModelError."""
        with self._lock:
            if self._is_closed:
                return False
            self._child.close()  # it may have closed its connection and still run
            self.info = self._start()
            return True

    # -- on the loop

    async def _watch(self) -> None:
        """Read reports; start the process again when it has died, until it is closed."""
        while True:
            self._channel = await LoopChannel.over(self._child.sock, Sent)
            self.is_ready, hung = True, ""
            try:
                while True:
                    sent: Sent = await self._channel.receive(self.kind.silence_s)
                    if not isinstance(sent, Pong):
                        self._deliver(sent)
            except EOFError:
                pass
            except TimeoutError:
                hung = self.kind.silent
                self._child.kill()
            except msgspec.MsgspecError as error:
                log.error("%s: its process cannot be understood: %s", self._name, error)
            self.is_ready = False
            self._channel.close()
            reason = hung or await asyncio.to_thread(self._child.reason)
            if self._reports is not None:
                stopping = Unavailable("the server is stopping")
                self._reports.put_nowait(stopping if self._is_closed else GenerationFailed(reason))
            if self._is_closed or not await self._started_again(reason):
                return

    def _deliver(self, report: Report) -> None:
        """Deliver a report to its order; reports of cancelled orders are dropped."""
        if self._reports is not None and report.id == self._current:
            self._reports.put_nowait(report)

    async def _started_again(self, reason: str) -> bool:
        log.error("%s: %s; it is started again", self._name, reason)
        keeper = Keeper()
        while True:
            try:
                is_there = await asyncio.to_thread(self._restart)
            except ModelError as error:
                log.error("%s: %s", self._name, error)
                await asyncio.sleep(keeper.pause_s())
                continue
            self.num_restarts += is_there
            return is_there
