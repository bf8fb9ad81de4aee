"""Sleeper: puts one model to sleep and wakes it, one call after the other; requests are refused meanwhile.

After level 1 the files must be unchanged when the model wakes; after level 2 it loads whatever lies at its path.
"""

import asyncio
from collections.abc import Callable

from kvloom.contract.errors import Unavailable
from kvloom.server.serving.engine import EngineLike

_POLL_S = 0.02
LEVELS = (1, 2)


class Sleeper:
    """Owned by the server's loop. `num_running`: generations accepted and not ended; `stop_running` ends them."""

    def __init__(
        self, name: str, engine: EngineLike, num_running: Callable[[], int], stop_running: Callable[[], None]
    ) -> None:
        self._name, self._engine = name, engine
        self._num_running, self._stop_running = num_running, stop_running
        self._lock = asyncio.Lock()
        self._is_closed = False  # no new request is accepted
        self._is_hurried = False  # running requests are ended at once
        self.level = 0  # 0 = awake

    def check_awake(self) -> None:
        """Raises Unavailable while the model sleeps or is about to."""
        if self.level:
            raise Unavailable(f"the model {self._name} is asleep; POST /wake_up wakes it")
        if self._is_closed:
            raise Unavailable(f"the model {self._name} is being put to sleep; POST /wake_up wakes it")

    async def sleep(self, level: int, hurries: bool) -> None:
        """Returns when the memory is free. Running requests finish first, or end at once with what they have if
        `hurries`.

        A sleeping model takes the new level. Raises Unavailable when it is not ready, or the server stops.
        """
        self._is_hurried = self._is_hurried or hurries
        async with self._lock:
            try:
                if not self.level:
                    self._engine.check_ready()
                    self._is_closed = True
                    await self._wait_idle()
                    await self._engine.sleep()
                self.level = level
            finally:
                self._is_closed, self._is_hurried = self.level > 0, False

    async def wake(self) -> None:
        """Does nothing when awake. Raises ModelError when the model cannot be loaded (it stays asleep), Unavailable."""
        async with self._lock:
            if self.level:
                await self._engine.wake(wants_same_weights=self.level == 1)
                self.level, self._is_closed = 0, False

    async def _wait_idle(self) -> None:
        while self._num_running():
            if self._is_hurried:
                self._stop_running()
            await asyncio.sleep(_POLL_S)
