"""Outage: from the death of a rank until the next one is loaded.

Loading goes on on a thread of its own, and is tried until it works; the engine's thread goes on answering.
"""

import logging
import threading
import time
from collections.abc import Callable

from kvloom.contract.errors import ModelError
from kvloom.engine.link.executor import RankDied

log = logging.getLogger(__name__)

_KILL_EVERY_S = 0.05
_AGAIN_S = 1.0  # before a model that was loaded and died at once is loaded again
FilesStamp = list[tuple[str, int, int, int]]  # see checkpoints.fingerprint.stamp


class Outage:
    """Owned by the engine's thread. While it is not `is_loaded` nobody else uses the ranks."""

    def __init__(self, why: str, weights: FilesStamp, patience_s: float) -> None:
        """`weights`: those that the dead rank had loaded; requests wait `patience_s` for the next."""
        self.why, self.weights, self._patience_s = why, weights, patience_s
        self._began_s = time.monotonic()
        self.has_given_up = False  # nobody waits any more
        self.is_loaded = False
        self._is_cancelled = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def passed_s(self) -> float:
        return time.monotonic() - self._began_s

    @property
    def left_s(self) -> float | None:
        """How long requests wait yet; None = they do not any more."""
        return None if self.has_given_up else max(0.0, self._patience_s - self.passed_s)

    def load(self, load: Callable[[], None], on_loaded: Callable[[], object]) -> None:
        """Begin to load the model, unless that is under way. Both are called from another thread."""
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
        """Give up loading: `kill` ends what is being loaded. When this returns the ranks are the caller's again."""
        self._is_cancelled.set()
        while self._thread is not None and self._thread.is_alive():
            kill()
            self._thread.join(_KILL_EVERY_S)


def restart_with_backoff(
    restart: Callable[[], object], is_closing: Callable[[], bool], sleep: Callable[[float], object] = time.sleep
) -> bool:
    """Restart until it works, waiting 0.1 s, 0.2 s, ... 10 s between tries. False when closing came first."""
    delay_s = 0.1
    while not is_closing():
        try:
            restart()
            return True
        except Exception as error:  # whatever it was: the model stays away until it can be loaded, and the log says why
            if not is_closing():
                is_known = isinstance(error, ModelError | RankDied | OSError)
                log.error("loading the model again failed: %s", error, exc_info=not is_known)
            sleep(delay_s)
            delay_s = min(2 * delay_s, 10.0)
    return False
