"""EngineThread: the only place where the engine's thread and asyncio meet, once a step."""

import asyncio
import contextlib
import functools
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace

from kvloom.engine.adapters import Adapter
from kvloom.engine.batch import RankInfo
from kvloom.engine.completed import CompletedLog
from kvloom.engine.config import EngineConfig
from kvloom.engine.detok import Vocabulary
from kvloom.engine.engine import Engine
from kvloom.engine.errors import GenerationFailed, ModelError, ServingError, Unavailable
from kvloom.engine.executor import Executor, Progress, RankDied, RankExecutor, restart_with_backoff
from kvloom.engine.request import Delta, FinishReason, Request
from kvloom.engine.stats import Stats

log = logging.getLogger(__name__)

_TIER_POLL_S = 0.002  # how soon an engine with nothing to compute notices what the outer KV tier has brought
_STATS_S = 0.02
_IDLE_POLL_S = 0.2  # how soon an idle engine notices that its rank died


@dataclass(frozen=True, slots=True)
class _Add:
    request: Request


@dataclass(frozen=True, slots=True)
class _Drop:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Load:
    path: str
    answer: asyncio.Future[Adapter]  # owned by the loop


@dataclass(frozen=True, slots=True)
class _Unload:
    adapter: int


_Message = _Add | _Drop | _Load | _Unload


class EngineThread:
    """Runs an Engine on a thread of its own; streams are read from one asyncio loop.

    A rank that dies ends its requests with an error and is restarted, with back-off, while `is_ready` is False.
    """

    def __init__(self, engine: Engine, executor: Executor) -> None:
        self._engine = engine
        self._executor = executor
        self._inbox: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        self._queues: dict[str, asyncio.Queue[Delta | ServingError]] = {}  # owned by the loop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._closing = threading.Event()
        self._ready = threading.Event()
        self._stats = engine.stats()
        self._next_stats_s = 0.0
        self._num_restarts = 0
        self._completed = CompletedLog(executor.info.block_size)

    @property
    def info(self) -> RankInfo:
        return self._executor.info

    @property
    def max_seq_len(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return self._engine.max_seq_len

    @property
    def is_ready(self) -> bool:
        """Whether requests are accepted: started, not closing, and the model is loaded."""
        return self._ready.is_set()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to work; streams must be read on `loop`."""
        self._loop = loop
        self._ready.set()
        self._thread.start()

    def close(self, timeout_s: float = 10.0) -> None:
        """End all requests with an error, the thread and the rank. Safe to call twice."""
        self._ready.clear()
        self._closing.set()
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        self._executor.close()

    def stats(self) -> Stats:
        """As of the last step; of what no request's coming or going changed, up to 20 ms older."""
        return self._stats

    async def stream(self, request: Request) -> AsyncGenerator[Delta]:
        """The request's deltas. Closing the stream (`aclosing`) is the cancel: its blocks are free within one step.

        Raises Unavailable when the engine is not ready, BadRequest when the request can never run, GenerationFailed
        when the model failed under it.
        """
        if not self.is_ready:
            raise Unavailable("the model is not ready: it is starting, restarting or stopping; try again soon")
        deltas: asyncio.Queue[Delta | ServingError] = asyncio.Queue()
        self._queues[request.id] = deltas
        self._inbox.put(_Add(request))
        try:
            while True:
                delta = await deltas.get()
                if isinstance(delta, ServingError):
                    raise delta
                if delta.finish_reason is FinishReason.ERROR:
                    raise GenerationFailed(delta.error or "the model failed")
                yield delta
                if delta.finish_reason:
                    return
        finally:  # normal end, disconnect or cancel alike
            self._queues.pop(request.id, None)
            self._inbox.put(_Drop(request.id))  # a no-op when it had finished

    def abort(self, request_id: str) -> None:
        """End a request with what it has: its stream's last delta says ABORT. Unknown ids are ignored."""
        self._inbox.put(_Drop(request_id))

    def preload_adapter(self, path: str) -> Adapter:
        """As load_adapter, before `start`. Raises BadRequest, ModelError."""
        try:
            return self._engine.adapters.load(path)
        except RankDied as error:
            raise ModelError(f"loading the adapter {path} failed: {error}") from error

    async def load_adapter(self, path: str) -> Adapter:
        """A LoRA adapter from a folder, loaded between two steps. Raises BadRequest, Unavailable."""
        if not self.is_ready:
            raise Unavailable("the model is not ready: it is starting, restarting or stopping; try again soon")
        answer: asyncio.Future[Adapter] = asyncio.get_running_loop().create_future()
        self._inbox.put(_Load(path, answer))
        return await answer

    def unload_adapter(self, adapter: int) -> None:
        """Requests that run with it finish; later ones are refused. Unknown ids are ignored."""
        self._inbox.put(_Unload(adapter))

    # -- on the engine's thread

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._take_inbox()
                self._deliver(self._engine.start_step())
                self._engine.finish_step()
            except RankDied as error:
                self._mourn(str(error))
            except Exception:  # our mistake; whoever waits must still be answered
                log.exception("the engine failed on a step")
                self._mourn("the engine failed on a step; the server's log says how")
            self._note_stats()
        self._deliver(self._engine.fail_all("the server is stopping"))
        while not self._inbox.empty():
            if isinstance(message := self._inbox.get(), _Load):
                self._answer(message, Unavailable("the server is stopping"))

    def _note_stats(self) -> None:
        """For other threads to read: when requests came or went, else not in every step, which may be a short one."""
        now_s = time.monotonic()
        if now_s >= self._next_stats_s or not self._engine.has_work:
            self._stats = replace(self._engine.stats(), total_restarts=self._num_restarts)
            self._next_stats_s = now_s + _STATS_S

    def _take_inbox(self) -> None:
        """Requests that have arrived; waits for one when there is nothing else to do. Raises RankDied."""
        while not self._engine.has_work and not self._closing.is_set():
            try:
                self._take(self._inbox.get(timeout=_IDLE_POLL_S))
            except queue.Empty:
                if not self._executor.is_alive():
                    raise RankDied("the model process died while idle") from None
        if self._engine.is_stalled:  # only the outer KV tier keeps us waiting
            with contextlib.suppress(queue.Empty):
                self._take(self._inbox.get(timeout=_TIER_POLL_S))
        while not self._inbox.empty():
            self._take(self._inbox.get())

    def _take(self, message: _Message | None) -> None:
        """Raises RankDied."""
        self._next_stats_s = 0.0
        if isinstance(message, _Add):
            try:
                self._engine.add(message.request)
                self._completed.added(message.request)
            except ServingError as error:
                self._post([(message.request.id, error)])
        elif isinstance(message, _Drop):
            self._engine.abort(message.request_id)
        elif isinstance(message, _Load):
            self._load(message)
        elif isinstance(message, _Unload):
            self._engine.adapters.unload(message.adapter)

    def _load(self, message: _Load) -> None:
        """Raises RankDied."""
        try:
            self._answer(message, self._engine.adapters.load(message.path))
        except ServingError as error:
            self._answer(message, error)
        except RankDied:
            self._answer(message, Unavailable("the model process died while it loaded the adapter"))
            raise

    def _answer(self, message: _Load, result: Adapter | ServingError) -> None:
        def settle() -> None:
            if isinstance(result, Adapter):
                if message.answer.cancelled():  # nobody will ever name it
                    self.unload_adapter(result.id)
                else:
                    message.answer.set_result(result)
            elif not message.answer.done():
                message.answer.set_exception(result)

        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(settle)

    def _mourn(self, error: str) -> None:
        """Fail what was running, then bring the rank back; requests that slip in meanwhile fail too."""
        self._ready.clear()
        log.error("%s; requests running on it fail, restarting it", error)
        self._deliver(self._engine.fail_all(error))
        if restart_with_backoff(self._revive, self._closing.is_set, self._closing.wait):
            self._num_restarts += 1
            log.warning("the model is ready again")
            self._ready.set()

    def _revive(self) -> None:
        """The model and its adapters, as if just started. Raises ModelError, RankDied."""
        self._executor.restart()
        self._engine.reset()
        self._engine.adapters.reload()

    def _deliver(self, deltas: list[Delta]) -> None:
        self._completed.delivered(deltas, self._stats)
        if any(delta.finish_reason for delta in deltas):
            self._next_stats_s = 0.0
        self._post([(delta.request_id, delta) for delta in deltas])

    def _post(self, items: list[tuple[str, Delta | ServingError]]) -> None:
        if items and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._dispatch, items)

    def _dispatch(self, items: list[tuple[str, Delta | ServingError]]) -> None:
        for request_id, item in items:
            if request_id in self._queues:
                self._queues[request_id].put_nowait(item)


def open_engine(
    config: EngineConfig, vocabulary: Callable[[], Vocabulary], progress: Progress | None = None
) -> EngineThread:
    """Start a rank process, load the model in it, and put an engine thread on top. Raises ModelError.

    `vocabulary` is called while the process starts; `progress(done_bytes, total_bytes)` while weights are loaded.
    """
    vocabulary = functools.cache(vocabulary)
    executor = RankExecutor(config, lambda: sorted(vocabulary().eos_ids), progress)
    return EngineThread(Engine(config, executor, vocabulary()), executor)
