"""Circuit: a pool that fails or is late costs one deadline; then it is not called until it has been found healthy.

A thread of its own checks it after 1 s, 2 s, 4 s ... 30 s.
"""

import logging
import threading
import time
from collections.abc import Callable

from ems.common.breaker import Breaker

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
_START_S = 10.0  # on a busy machine the first call may take longer than a request would wait


class Circuit:
    """Whether to call the pool. `connect` checks it, on a thread, repeatedly while it is down."""

    def __init__(self, connect: Callable[[], bool], first_pause_s: float = FIRST_PAUSE_S) -> None:
        self._connect = connect
        self._breaker = Breaker(max_failures=1, first_pause_s=first_pause_s)
        self._changed = threading.Condition()
        self._is_up = False
        self._has_looked = False
        self._is_closed = False
        self._thread = threading.Thread(target=self._watch, name="ems-health", daemon=True)
        self._thread.start()

    @property
    def is_up(self) -> bool:
        return self._is_up

    def wait_for_first_look(self) -> None:
        """Wait, at most 10 s, until it is known whether the pool is there: at startup, when no request waits yet."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_looked, _START_S)

    def failed(self, problem: str) -> None:
        """The pool failed a call: it is not called until it has been found healthy."""
        with self._changed:
            if self._is_up:
                log.warning("the KV pool failed (%s); going on without it", problem)
                self._is_up = False
                self._breaker.fail(time.monotonic())
                self._changed.notify_all()

    def succeeded(self) -> None:
        """The pool answered a call in time: the next failure counts as the first."""
        with self._changed:
            if self._is_up:
                self._breaker.succeed()

    def close(self) -> None:
        with self._changed:
            self._is_up, self._is_closed = False, True
            self._changed.notify_all()
        self._thread.join()

    def _watch(self) -> None:
        """Check now, and whenever the breaker allows it until the pool is healthy; then wait for a call that fails."""
        while self._may_look():
            is_healthy = self._connect()
            with self._changed:
                self._has_looked = True
                if not is_healthy:
                    self._breaker.fail(time.monotonic())
                elif not self._is_closed:
                    log.info("the KV pool is up")
                    self._is_up = True
                self._changed.notify_all()

    def _may_look(self) -> bool:
        """Wait until the next check is due. False when the circuit was closed meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or not self._is_up)
            while not self._is_closed and not self._breaker.allows(time.monotonic()):
                self._changed.wait(self._breaker.pause_s(time.monotonic()))
            return not self._is_closed
