"""Host: the process of an engine that schedules by itself, started, watched and restarted."""

import contextlib
import functools
import socket
import time
from collections import deque
from collections.abc import Callable

from kvloom.checkpoints.lora import FIELD
from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import BadRequest
from kvloom.contract.hosted import HostOrder, HostReport, HostSetup, ResetCache, WasReset
from kvloom.contract.lifecycle import Failed, Loading, Ready
from kvloom.contract.messages import (
    AdapterInfo,
    AdapterLoaded,
    AdapterRefused,
    LoadAdapter,
    Progress,
    RankInfo,
    UnloadAdapter,
)
from kvloom.engine.link.executor import RankDied
from kvloom.processes.channel import Channel, ready_of
from kvloom.processes.child import Child, Kind, starting


class Host:
    """A process and all that it starts; they end when this process does. Used from the engine's thread."""

    def __init__(
        self,
        kind: Kind,
        config: EngineConfig,
        eos_ids: Callable[[], list[int]],
        progress: Progress | None = None,
    ) -> None:
        """Starts the process and waits until the model is loaded. Raises ModelError when it cannot be."""
        self._kind, self._config, self._progress = kind, config, progress
        self._eos_ids = functools.cache(eos_ids)
        self._child: Child | None = None
        self._start()

    @property
    def pids(self) -> list[int]:
        """Of the process."""
        return [] if self._child is None else [self._child.pid]

    def send(self, order: HostOrder) -> None:
        """Raises RankDied."""
        try:
            self._channel.send(order, self._config.step_timeout_s)
        except TimeoutError as error:
            raise RankDied(self._no_answer) from error
        except OSError as error:
            raise RankDied(self._last_words()) from error

    def collect(self) -> list[HostReport]:
        """Wait for messages and return them; none when `nudge` was called. Raises RankDied."""
        while not self._backlog:
            left_s = max(0.0, self._heard_s + self._config.step_timeout_s - time.monotonic())
            ready = [self._channel] if self._channel.has_message else self._select(left_s)
            if not ready:
                raise RankDied(self._no_answer)
            if self._woken in ready:
                self._woken.recv(4096)
                break
            self._receive()
        return self.heard()

    def heard(self) -> list[HostReport]:
        """The messages that have arrived, without waiting. Raises RankDied."""
        self._read_what_is_there()
        found = list(self._backlog)
        self._backlog.clear()
        return found

    def nudge(self) -> None:
        """Make a waiting `collect` return. May be called from any thread."""
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake.send(b"!")

    def expect_from_now(self) -> None:
        """The host has work from now on: `step_timeout_s` of silence counts as its death."""
        self._heard_s = time.monotonic()

    def load_adapter(self, id: int, path: str) -> AdapterInfo:
        """See Executor."""
        self.send(LoadAdapter(id, path))
        answer = self._answer((AdapterLoaded, AdapterRefused))
        if isinstance(answer, AdapterLoaded):
            return answer.info
        assert isinstance(answer, AdapterRefused)
        raise BadRequest(answer.field or FIELD, answer.problem)

    def unload_adapter(self, id: int) -> None:
        """See Executor."""
        self.send(UnloadAdapter(id))

    def reset_cache(self, preempts: bool) -> None:
        """Raises RankDied."""
        self.send(ResetCache(preempts))
        self._answer((WasReset,))

    def is_alive(self) -> bool:
        """Whether the process runs. Reads the messages that have arrived meanwhile."""
        if self._child is None or self._child.exit_code is not None:
            return False
        try:
            self._read_what_is_there()
        except RankDied:
            return False
        return True

    def restart(self) -> None:
        """Kill what is left and load the model again. Raises ModelError or RankDied."""
        self.kill()
        self.close()
        self._start()

    def kill(self) -> None:
        """Kill the process and those that it has started, without waiting for them. May be called from any thread."""
        if (child := self._child) is not None:
            child.kill()

    def close(self) -> None:
        """End the process: close its socket, and kill it after some seconds."""
        if self._child is None:
            return
        for end in (self._channel, self._woken, self._wake):
            end.close()
        self._child.end()
        self._child = None

    # -- starting

    def _start(self) -> None:
        self._woken, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._child = Child(self._kind, "engine")
        self._channel = Channel(self._child.sock, HostReport)
        self._backlog: deque[HostReport] = deque()
        with starting(self._config.model, self._exit_reason, self.close):
            self._channel.send(HostSetup(self._config, self._eos_ids()))
            self.info = self._wait_ready()

    def _wait_ready(self) -> RankInfo:
        while True:
            self._receive()
            report = self._backlog.pop()
            if isinstance(report, Ready):
                return report.info
            if isinstance(report, Loading) and self._progress is not None:
                self._progress(report.done_bytes, report.total_bytes)

    # -- reading

    def _select(self, timeout_s: float) -> list[Channel | socket.socket]:
        waited: list[Channel | socket.socket] = [self._channel, self._woken]
        return ready_of(waited, timeout_s)

    def _receive(self) -> None:
        """Read one message into the backlog. Raises RankDied."""
        try:
            report: HostReport = self._channel.receive()
        except (EOFError, OSError) as error:
            raise RankDied(self._exit_reason()) from error
        if isinstance(report, Failed):
            raise RankDied(report.error)
        self._heard_s = time.monotonic()
        self._backlog.append(report)

    def _read_what_is_there(self) -> None:
        """Read the messages that have arrived, without waiting. Raises RankDied."""
        while self._channel.is_readable():
            self._receive()

    def _answer(self, kinds: tuple[type[HostReport], ...]) -> HostReport:
        """The next message of one of these kinds; others stay for `collect`. Raises RankDied."""
        deadline_s, kept = time.monotonic() + self._config.step_timeout_s, deque[HostReport]()
        try:
            while True:
                while self._backlog:
                    report = self._backlog.popleft()
                    if isinstance(report, kinds):
                        return report
                    kept.append(report)
                if not self._channel.is_readable(max(0.0, deadline_s - time.monotonic())):
                    raise RankDied(self._no_answer)
                self._receive()
        finally:
            kept.extend(self._backlog)
            self._backlog = kept

    @property
    def _no_answer(self) -> str:
        return f"the model did not answer within {self._config.step_timeout_s:g} s"

    def _last_words(self) -> str:
        """The failure that it reported before it ended, else how it ended."""
        try:
            self._read_what_is_there()
        except RankDied as error:
            return str(error)
        return self._exit_reason()

    def _exit_reason(self) -> str:
        """How it ended, for people. Waits a moment for a process that is just ending."""
        assert self._child is not None
        return self._child.reason()
