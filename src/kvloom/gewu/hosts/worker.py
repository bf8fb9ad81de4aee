"""WorkerHost: the daemon's side of a worker process, which holds one model."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import msgspec

from kvloom.contract.errors import ModelError
from kvloom.contract.lifecycle import Failed, Loading, Ping, Pong, Ready
from kvloom.gewu.modelfiles import ModelFiles
from kvloom.gewu.protocol.messages import (
    Events,
    Held,
    Host,
    Listeners,
    Open,
    Order,
    Report,
    WorkerInfo,
)
from kvloom.processes import kinds
from kvloom.processes.child import Child, Template
from kvloom.processes.keeper import Keeper
from kvloom.processes.loop_channel import LoopChannel

_START_FACTOR = 4  # the engine's libraries are imported before its first message


class WorkerHost:
    """Implements Host."""

    def __init__(
        self, child: Child, channel: LoopChannel, info: WorkerInfo, on: Listeners, left: Callable[[bool], None]
    ) -> None:
        """Ends the process when it answers nothing for its kind's `silence_s`. `left` is called once when it
        has died or is closed, and told which.
        """
        self.info = info
        self.pid: int | None = child.pid
        self.held_tokens: dict[str, int] = {}
        self._child, self._channel, self._left = child, channel, left
        self._has_left = False
        self._keeper = Keeper(child.kind.silence_s)
        self._task = asyncio.get_running_loop().create_task(self._read(on))

    def send(self, order: Order) -> None:
        self._channel.send(order)

    def watch(self, interval_s: float) -> None:
        """See Host."""
        if self._keeper.passed(interval_s):
            self.send(Ping())
        elif self._keeper.is_hung:
            self._child.kill()

    async def close(self) -> None:
        """End it; afterwards its memory is free."""
        self._task.cancel()
        await _end(self._child, self._channel)
        self._leave(True)

    def _leave(self, is_closed: bool) -> None:
        if not self._has_left:
            self._has_left = True
            self._left(is_closed)

    async def _read(self, on: Listeners) -> None:
        why = ""
        try:
            while True:
                report: Report = await self._channel.receive()
                self._keeper.heard(is_answer=isinstance(report, Pong))
                if isinstance(report, Events):
                    on.events(report.events)
                elif isinstance(report, Held):
                    self.held_tokens = report.tokens
                elif isinstance(report, Failed):
                    why = report.error
        except EOFError:
            await _end(self._child, self._channel)
            self._leave(False)
            if self._keeper.is_hung:
                why = self._child.kind.silent
            on.death(why or self._child.reason())


class WorkerOpener:
    """Implements Opener. A process that sends nothing for `silence_s` is ended.

    Workers are forked from a template, which the first one starts; it ends with the last one that is closed, but not
    with one that dies, whose successor it forks.
    """

    has_processes = True

    def __init__(self, silence_s: float) -> None:
        self._kind = replace(kinds.WORKER, silence_s=silence_s)
        self._template = Template.of(self._kind)
        self._num_workers = 0  # that live, or are being opened
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def pids(self) -> list[int]:
        """Processes that hold no model."""
        return self._template.pids

    async def __call__(self, setup: Open, files: ModelFiles, on: Listeners) -> Host:
        """Start a worker and wait until its model is loaded."""
        self._num_workers += 1
        try:
            with files.lay_out() as path:
                return await self._open(msgspec.structs.replace(setup, model=path), files, on)
        except OSError as error:
            self._left(True)
            raise ModelError(f"no process for the model can be started: {error}") from None
        except BaseException:
            self._left(True)
            raise

    async def _open(self, setup: Open, files: ModelFiles, on: Listeners) -> Host:
        child = await self._started(files)
        channel = await LoopChannel.over(child.sock, Report)
        try:
            channel.send(setup)
            report = await self._loaded(channel)
        except TimeoutError:
            child.kill()
            await _end(child, channel)
            raise ModelError(f"{child.kind.people} gave no sign of life while it loaded the model") from None
        except EOFError:
            await _end(child, channel)
            raise ModelError(f"{child.reason()} while it loaded the model") from None
        except BaseException:
            await _end(child, channel)
            raise
        if isinstance(report, Ready):
            return WorkerHost(child, channel, report.info, on, self._left)
        await _end(child, channel)
        why = report.error if isinstance(report, Failed) else f"{child.kind.people} broke the protocol"
        raise ModelError(why.replace(setup.model, files.path))

    async def _started(self, files: ModelFiles) -> Child:
        """A worker that inherits the files; ends as soon as it exists if the caller is cancelled. Raises OSError."""
        name, fds = f"worker of {files.path}", tuple(files.fds.values())
        start = partial(Child, self._kind, name, fds=fds, template=self._template)
        coming = asyncio.get_running_loop().run_in_executor(None, start)
        try:
            return await asyncio.shield(coming)
        except asyncio.CancelledError:
            coming.add_done_callback(_unwanted)
            raise

    async def _loaded(self, channel: LoopChannel) -> Report:
        """The first report that is not Loading. Raises TimeoutError, EOFError."""
        limit_s = self._kind.silence_s * _START_FACTOR
        while True:
            report: Report = await asyncio.wait_for(channel.receive(), limit_s)
            if not isinstance(report, Loading):
                return report
            limit_s = self._kind.silence_s

    def _left(self, is_closed: bool) -> None:
        self._num_workers -= 1
        if is_closed and not self._num_workers:
            task = asyncio.get_running_loop().create_task(asyncio.to_thread(self._template.close))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)


async def _end(child: Child, channel: LoopChannel) -> None:
    """Close the socket, which ends a worker between two steps; kill it if it does not end."""
    channel.close()
    await asyncio.to_thread(child.end)


def _unwanted(coming: "asyncio.Future[Child]") -> None:
    if not coming.cancelled() and coming.exception() is None:
        coming.result().kill()
        coming.result().close()
