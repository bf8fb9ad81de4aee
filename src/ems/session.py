"""Session: one rank's connection to the pool, with its ContextCaching. `Ems` has the process's one; others own more."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from ems.common.exception import EmsException
from ems.common.sockets import candidates, find_socket
from ems.config import LEGACY_DEFAULT_ACCESS_ID, EmsConfig
from ems.context_caching import WAS_SHUT_DOWN, ContextCaching
from ems.profiling import Profiler
from ems.transport import LinkPool
from ems.wire import messages as m

log = logging.getLogger("ems")


def locate_socket(_deadline_s: float) -> Path:
    """The agent's socket in one of the default paths. Raises OSError when there is none."""
    path = find_socket()
    if path is None:
        searched = ", ".join(map(str, candidates()))
        raise FileNotFoundError(f"no agent socket at {searched}; start `kvloom pool agent` or set EMS_EMBEDDED=1")
    return path


class Session:
    """Connects at the first call, and again after the agent's restart. `config` must be valid."""

    def __init__(self, config: EmsConfig, locate: Callable[[float], Path] = locate_socket) -> None:
        """locate: finds the agent's socket, given a deadline, or raises OSError."""
        assert config.cc_config is not None
        self._profiler = Profiler()
        self._has_answered = False
        self._complaint = ""  # the last problem logged of a pool that never answered
        access_id = "" if config.access_id in (None, LEGACY_DEFAULT_ACCESS_ID) else config.access_id or ""
        self._links = LinkPool(locate, access_id, config.access_key or "")
        self.caching = ContextCaching(self._links, config.cc_config, self._profiler)

    def ping(self, timeout_s: float) -> None:
        """Raises EmsException when the pool does not answer in time."""
        deadline_s = time.monotonic() + timeout_s
        with self._links.lend(deadline_s) as link:
            link.call(m.Ping(), deadline_s)
        self._has_answered = True

    def is_healthy(self, timeout_s: float) -> bool:
        """Whether the pool answers in time. Never raises."""
        try:
            self.ping(timeout_s)
        except EmsException as error:
            if not self._has_answered and str(error) != self._complaint:
                self._complaint = str(error)
                log.error("EMS init failed: %s", error)
            return False
        return True

    def close(self) -> None:
        """Waits for calls under way, at most until their deadlines."""
        self.caching.close()
        self._links.close(WAS_SHUT_DOWN)
        self._profiler.close()

    def after_fork(self) -> None:
        """In a forked child: create connections and threads anew."""
        self._links.after_fork()
        self.caching.after_fork()
        self._profiler.after_fork()
