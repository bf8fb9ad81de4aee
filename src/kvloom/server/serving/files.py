"""ReadOnce: something read from a model's files when it is first needed, not on the loop."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from kvloom.server.serving.service import GenerationService

T = TypeVar("T")


class ReadOnce(Generic[T]):
    """What `read` makes of the files of a model, by their path."""

    def __init__(self, read: Callable[[GenerationService], T]) -> None:
        self._read = read
        self._known: dict[str, T] = {}

    async def of(self, service: GenerationService) -> T:
        path = service.card.engine.model
        if path not in self._known:
            self._known[path] = await asyncio.to_thread(self._read, service)
        return self._known[path]
