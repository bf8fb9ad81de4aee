"""Outage: from the death of a rank until its successor is loaded.

A thread of its own retries until the model is loaded, while the engine's thread handles messages.
"""

import logging
import threading
import time
from collections.abc import Callable

from kvloom.contract.errors import ModelError
from kvloom.engine.link.executor import RankDied
from kvloom.processes.keeper import Keeper

log = logging.getLogger(__name__)

_KILL_EVERY_S = 0.05
_AGAIN_S = 1.0  # seconds before a model that died right after loading is loaded again
FilesStamp = list[tuple[str, int, int, int]]  # see checkpoints.fingerprint.stamp


class Outage:
    """Owned by the engine's thread. Until `is_loaded` only the loading thread may use the ranks."""

    def __init__(self, why: str, weights: FilesStamp, patience_s: float) -> None:
        """`weights`: stamp of the weights that the dead rank had loaded; requests wait up to `patience_s`."""
        self.why, self.weights, self._patience_s = why, weights, patience_s
        self._began_s = time.monotonic()
        self.has_given_up = False  # patience is used up, no request waits any more
        self.is_loaded = False
        self._is_cancelled = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def passed_s(self) -> float:
        return time.monotonic() - self._began_s

    @property
    def left_s(self) -> float | None:
        """Seconds that requests may still wait; None = patience is used up."""
        return None if self.has_given_up else max(0.0, self._patience_s - self.passed_s)

    def load(self, load: Callable[[], None], on_loaded: Callable[[], object]) -> None:
        """Start loading the model unless that is under way. `load` and `on_loaded` are called on another thread."""
        if self._thread is not None and not self.is_loaded:
            return

        def run(pause_s: float) -> None:
            self._is_cancelled.wait(pause_s)
            self.is_loaded = restart_with_backoff(load, self._is_cancelled.is_set, self._is_cancelled.wait)
            on_loaded()

        pause_s = _AGAIN_S if self.is_loaded else 0.0
        self.is_loaded = False
        self._thread = threading.Thread(target=run, args=(pause_s,), name="restart", daemon=True)
        self._thread.start()

    def cancel(self, kill: Callable[[], None]) -> None:
        """Stop loading; `kill` ends the processes that load. Afterwards the caller owns the ranks again."""
        self._is_cancelled.set()
        while self._thread is not None and self._thread.is_alive():
            kill()
            self._thread.join(_KILL_EVERY_S)


def restart_with_backoff(
    restart: Callable[[], object], is_closing: Callable[[], bool], sleep: Callable[[float], object] = time.sleep
) -> bool:
    """Call `restart` until it succeeds, with pauses of 0.1 s, 0.2 s, ... 10 s. False when the server closes first."""
    keeper = Keeper()
    while not is_closing():
        try:
            restart()
            return True
        except Exception as error:  # whatever it is: the log has it, and the next try follows
            if not is_closing():
                is_known = isinstance(error, ModelError | RankDied | OSError)
                log.error("loading the model again failed: %s", error, exc_info=not is_known)
            sleep(keeper.pause_s())
    return False
