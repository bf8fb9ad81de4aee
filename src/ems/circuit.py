"""Circuit: whether a pool is worth asking. One that fails or is late costs one deadline; then it is left alone until a
thread of its own has found it healthy again, looking after 1 s, 2 s, 4 s ... 30 s.
"""

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 30.0


class Circuit:
    """Whether the pool is worth asking. `connect` says so: called on a thread, again and again while it is not."""

    def __init__(self, connect: Callable[[], bool], first_pause_s: float = FIRST_PAUSE_S) -> None:
        self._connect = connect
        self._first_pause_s = self._pause_s = first_pause_s
        self._changed = threading.Condition()
        self._is_up = False
        self._is_closed = False
        self._thread = threading.Thread(target=self._watch, name="ems-health", daemon=True)
        self._thread.start()

    @property
    def is_up(self) -> bool:
        return self._is_up

    def wait_up(self, timeout_s: float) -> None:
        """Until the pool is up, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_up, timeout_s)

    def failed(self, problem: str) -> None:
        """The pool failed a call: nothing is asked of it until it has been found healthy."""
        with self._changed:
            if self._is_up:
                log.warning("the KV pool failed (%s); going on without it", problem)
            self._is_up = False
            self._changed.notify_all()

    def succeeded(self) -> None:
        """The pool answered somebody who waited: the next failure is a first one."""
        self._pause_s = self._first_pause_s

    def close(self) -> None:
        with self._changed:
            self._is_up, self._is_closed = False, True
            self._changed.notify_all()
        self._thread.join()

    def _watch(self) -> None:
        is_first = True
        while True:
            if not is_first:
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed or not self._is_up)
                    self._changed.wait_for(lambda: self._is_closed, self._pause_s)
                self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)
            if self._is_closed:
                return
            is_first = False
            is_healthy = self._connect()
            with self._changed:
                if is_healthy and not self._is_closed:
                    log.info("the KV pool is up")
                    self._is_up = True
                    self._changed.notify_all()
