"""OneKind: runs requests together that may share a step, and separates those that may not. Does not need vLLM."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class OneKind:
    """Any number of one kind at a time, the kinds in order of arrival. Owned by the loop."""

    def __init__(self) -> None:
        self._kind = ""
        self._num_inside = 0
        self._waiting: deque[tuple[str, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def among(self, kind: str) -> AsyncIterator[None]:
        """Waits until no other kind is inside or was here earlier. "" neither waits nor is waited for."""
        if kind:
            await self._enter(kind)
        try:
            yield
        finally:
            if kind:
                self._leave()

    async def _enter(self, kind: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((kind, turn))
        self._let_in()
        try:
            await turn
        except asyncio.CancelledError:
            self._num_inside -= not turn.cancelled()
            self._let_in()
            raise

    def _leave(self) -> None:
        self._num_inside -= 1
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting:
            kind, turn = self._waiting[0]
            if self._num_inside and kind != self._kind and not turn.done():
                return
            self._waiting.popleft()
            if not turn.done():
                self._kind = kind
                self._num_inside += 1
                turn.set_result(None)
