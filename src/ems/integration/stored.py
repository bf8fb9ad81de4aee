"""Blocks that all ranks have saved: reported once, for vLLM's KV events. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_MAX_WAITING = 1 << 16  # blocks whose saves were not reported; those of failed saves are among them


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """hash: the engine's own; parent: that of the block before it, None at the beginning of a prompt."""

    hash: Any
    parent: Any
    tokens: tuple[int, ...]
    adapter: str | None = None


class Stored:
    """Counts the reports of ranks. Blocks are known by the names under which they are saved."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[StoredBlock, int]] = {}
        self._done: list[StoredBlock] = []

    def expect(self, name: int, block: StoredBlock) -> None:
        """The ranks were told to save the block."""
        self._waiting[name] = (block, 0)
        while len(self._waiting) > _MAX_WAITING:
            del self._waiting[next(iter(self._waiting))]

    def report(self, counts: Mapping[int, int], num_ranks: int) -> None:
        """counts: by name, how many more ranks have saved it."""
        for name, count in counts.items():
            if name in self._waiting:
                block, before = self._waiting[name]
                if before + count < num_ranks:
                    self._waiting[name] = (block, before + count)
                else:
                    del self._waiting[name]
                    self._done.append(block)

    def take(self) -> list[StoredBlock]:
        """Blocks that all ranks have saved since the last call."""
        done, self._done = self._done, []
        return done
