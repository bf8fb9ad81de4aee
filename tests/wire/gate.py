"""A fake model whose steps wait until a test releases them."""

import threading
from typing import Any

import pytest

from kvloom.rank.fake import FakeRunner

LIMIT_S = 120.0


class Gate:
    """Holds every FakeRunner's steps until the test releases some (`let`) or all later ones (`open`)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._leave = threading.Semaphore(0)
        self._is_open = threading.Event()
        self.sizes: list[int] = []  # the number of sequences of every step that began
        self._num_let = 0
        run = FakeRunner.run

        def gated(runner: FakeRunner, batch: Any) -> Any:
            self.sizes.append(len(batch.work))
            if not self._is_open.is_set():
                assert self._leave.acquire(timeout=LIMIT_S), "nobody opened the gate"
            return run(runner, batch)

        monkeypatch.setattr(FakeRunner, "run", gated)

    def let(self, num_steps: int = 1) -> None:
        self._num_let += num_steps
        self._leave.release(num_steps)

    @property
    def is_waited_at(self) -> bool:
        """Whether a step waits and every released one has ended."""
        return len(self.sizes) == self._num_let + 1

    def open(self) -> None:
        self._is_open.set()
        self._leave.release()
