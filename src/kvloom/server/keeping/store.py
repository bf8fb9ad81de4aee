"""The store of responses: runs its database on a thread of its own, so that the event loop never waits for a disk."""

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from kvloom.contract.errors import Unavailable
from kvloom.server.keeping.database import Database
from kvloom.server.keeping.limits import Limits

P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger(__name__)


class StoreFailed(Unavailable):
    """The file cannot be read or written: the disk is full, or broken."""


class ResponseStore:
    """Calls run in order, so a read after a write sees what was written."""

    def __init__(self, path: Path, limits: Limits | None = None, now: Callable[[], float] = time.time) -> None:
        """Raises UnusableFile."""
        self._thread = ThreadPoolExecutor(1, "responses")
        self._late: set[asyncio.Task[None]] = set()
        try:
            self._database = self._thread.submit(Database, path, limits or Limits(), now).result()
        except BaseException:
            self._thread.shutdown()
            raise

    def close(self) -> None:
        """Finish all calls that were made before. Blocks."""
        self._thread.submit(self._database.close).result()
        self._thread.shutdown()

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """Schedule work on the loop that no caller waits for."""
        task = asyncio.create_task(work)
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    async def do(self, method: Callable[Concatenate[Database, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a method of Database on the thread; it completes even if the caller is cancelled.

        Raises StoreFailed, and what the method raises.
        """
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, lambda: method(self._database, *args, **kwargs))
        except sqlite3.Error as error:
            log.error("the store of responses failed: %s", error)
            raise StoreFailed(f"the store of responses failed: {error}") from None
