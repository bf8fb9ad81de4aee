"""EngineThread: where the engine's thread and asyncio meet, once a step and nowhere else."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from kvloom.contract.errors import ModelError, Unavailable
from kvloom.contract.messages import RankInfo
from kvloom.contract.request import Delta, Request
from kvloom.engine.adapters import Adapter
from kvloom.engine.driven import Driven
from kvloom.engine.driver import STOPPING, Driver
from kvloom.engine.feed import Feed, Feeds
from kvloom.engine.inbox import Add, Asked, Drop, Load, Reset, Sleep, Unload, Wake
from kvloom.engine.link.executor import Process, RankDied
from kvloom.engine.stats import Stats

_NOTICE_S = 10.0  # in which the thread notices that its ranks are killed: until then their channels stay open


class EngineThread:
    """Runs an engine on a thread of its own; its streams are read from one asyncio loop.

    A rank that dies is restarted, with back-off; meanwhile `is_ready` is False, and requests wait and then continue.
    """

    def __init__(self, engine: Driven, executor: Process) -> None:
        self._engine = engine
        self._executor = executor
        self._feeds = Feeds()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._driver = Driver(engine, executor, self._soon, self._feeds.put)
        self._thread = threading.Thread(target=self._driver.run, name="engine", daemon=True)

    @property
    def info(self) -> RankInfo:
        """RankInfo of the loaded model; while a rank restarts, of the one before."""
        return self._executor.info

    @property
    def max_seq_len(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return self._engine.max_seq_len

    @property
    def is_ready(self) -> bool:
        """Whether new requests run at once: started, not closing, and the model is loaded."""
        return self._driver.is_ready

    def check_ready(self) -> None:
        """Raises Unavailable, with the reason."""
        self._driver.check_ready()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the engine's thread; streams must be read on `loop`."""
        self._loop = loop
        self._driver.open()
        self._thread.start()

    def close(self, timeout_s: float = 10.0) -> None:
        """End all requests with an error, then the thread and the ranks. May be called twice.

        timeout_s: how long a step may last on; then its ranks are killed.
        """
        self._driver.close()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
            if self._thread.is_alive():  # a rank hangs in its step
                self._executor.kill()
                self._thread.join(_NOTICE_S)
        self._executor.close()

    def stats(self) -> Stats:
        """Stats as of the last step; up to 0.1 s older where no request came or ended since."""
        return self._driver.stats

    def open(self, requests: Sequence[Request]) -> Feed:
        """Start the requests; their deltas come through one feed.

        Raises Unavailable when none are accepted, BadRequest when an id is in use. While a rank restarts they wait.
        """
        self._driver.check_open()
        feed = Feed(requests, self._drop)
        self._feeds.add(feed)
        for request in requests:
            self._driver.put(Add(request))
        return feed

    async def stream(self, request: Request) -> AsyncGenerator[Delta]:
        """The deltas of one request, a list a step; closing the stream (`aclosing`) cancels the request."""
        with self.open([request]) as feed:
            while (step := await feed.get()) is not None:
                for _, delta in step:
                    yield delta

    def abort(self, request_id: str) -> None:
        """End a request with what it has: the last delta of its stream says ABORT. Unknown ids are ignored."""
        self._driver.put(Drop(request_id))

    def preload_adapter(self, path: str) -> Adapter:
        """As load_adapter, before `start`. Raises BadRequest, ModelError."""
        try:
            return self._engine.adapters.load(path)
        except RankDied as error:
            raise ModelError(f"loading the adapter {path} failed: {error}") from error

    async def load_adapter(self, path: str) -> Adapter:
        """A LoRA adapter from a folder, loaded between two steps. Raises BadRequest, Unavailable."""
        self.check_ready()
        answer: asyncio.Future[Adapter] = asyncio.get_running_loop().create_future()
        self._driver.put(Load(path, answer))
        return await answer

    def unload_adapter(self, adapter: int) -> None:
        """Refuse the adapter to new requests; running ones finish. Unknown ids are ignored."""
        self._driver.put(Unload(adapter))

    async def reset_prefix_cache(self, preempts: bool) -> None:
        """Later requests find no block that is cached now; with `preempts` running ones are computed again too.

        Raises Unavailable.
        """
        if not self._driver.is_asleep:
            self.check_ready()
        await self._ask(lambda answer: Reset(preempts, answer))

    async def sleep(self) -> None:
        """Refuse new requests, let running ones finish, then end the ranks, which frees weights and KV cache.

        Does nothing when the model sleeps already. Raises Unavailable when the server stops or another caller wakes it
        meanwhile.
        """
        await self._ask(Sleep)

    async def wake(self, wants_same_weights: bool) -> None:
        """Load the model and its adapters again; does nothing when awake. When loading fails the model stays asleep.

        `wants_same_weights`: refuse files that have changed since they were loaded. Raises ModelError, Unavailable.
        """
        await self._ask(lambda answer: Wake(wants_same_weights, answer))

    async def _ask(self, message: Callable[[asyncio.Future[None]], Asked]) -> None:
        if self._driver.is_closing:
            raise Unavailable(STOPPING)
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._driver.put(message(answer))
        await answer

    def _drop(self, feed: Feed) -> None:
        for request_id in self._feeds.leave(feed):
            self._driver.put(Drop(request_id))  # does nothing when the request had finished

    def _soon(self, function: Callable[..., None], *arguments: Any) -> None:
        """From any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)
