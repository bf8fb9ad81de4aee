"""Ems: the process's one connection to the pool (spec ems 6 and 7), and the embedded mode."""

import atexit
import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ems.cc_v1.cc_config import CcConfig_v1
from ems.common.exception import EmsException, invalid_argument, io_error
from ems.common.sockets import find_socket, is_served
from ems.config import EmsConfig
from ems.context_caching import ContextCaching
from ems.private_agent import EmbeddedAgent
from ems.session import Session, locate_socket
from ems.values.pool import KvPool

_INIT_S = 5.0
_HEALTH_S = 1.0
_log = logging.getLogger("ems")
_EMBEDDED_POOL = "256M"


class _State:
    """What `Ems.init` creates and `Ems.shutdown` ends."""

    def __init__(self, config: EmsConfig, embedded: EmbeddedAgent | None) -> None:
        self.identity = _identity_of(config)
        self.embedded = embedded
        self.session = Session(config, self.locate)

    def locate(self, deadline_s: float) -> Path:
        """The agent's socket now. Raises OSError when there is none."""
        return self.embedded.locate(deadline_s) if self.embedded is not None else locate_socket(deadline_s)

    def close(self, stops_agent: bool) -> None:
        self.session.close()
        if self.embedded is not None and stops_agent:
            self.embedded.stop()


def _identity_of(config: EmsConfig) -> tuple[str, str, CcConfig_v1]:
    """What makes two valid configs equal. A copy: the caller may set attributes of the config later."""
    assert config.cc_config is not None
    return config.access_id or "", config.access_key or "", replace(config.cc_config)


_lock = threading.Lock()
_state: _State | None = None
_embedded: EmbeddedAgent | None = None  # that of an enclosing embedded()


class Ems:
    """Class methods only: a process has one pool connection and one ContextCaching."""

    @classmethod
    def init(cls, config: EmsConfig) -> None:
        """Connects and authenticates. A second call with an equal config does nothing.

        Raises EmsException: EMS_INVALID_ARGUMENT for the config, EMS_IO_ERROR or EMS_IO_TIMEOUT for the pool.
        """
        try:
            cls._init(config)
        except EmsException as error:
            _log.error("EMS init failed: %s", error)
            raise

    @classmethod
    def _init(cls, config: EmsConfig) -> None:
        global _state
        if not isinstance(config, EmsConfig):
            raise invalid_argument("config", "must be an EmsConfig")
        config.validate()
        with _lock:
            if _state is not None:
                if _state.identity != _identity_of(config):
                    raise invalid_argument("config", "Ems is initialised with another one; call Ems.shutdown first")
                return
            state = _State(config, _embedded or _embedded_if_asked())
            try:
                if state.embedded is not None:
                    _start(state.embedded)
                state.session.ping(_INIT_S)
            except EmsException:
                state.close(stops_agent=state.embedded is not _embedded)
                raise
            _state = state

    @classmethod
    def get_cc(cls) -> ContextCaching | None:
        """The ContextCaching of this process; None before a successful init (spec ems 7.1)."""
        return _state.session.caching if _state is not None else None

    @classmethod
    def check_health(cls) -> bool:
        """Whether the pool answers within a second (spec ems 7.2). Never raises."""
        state = _state
        return state is not None and state.session.is_healthy(_HEALTH_S)

    @classmethod
    def shutdown(cls) -> None:
        """Ends the connection, and the private agent if `init` started one. Without init it does nothing."""
        global _state
        with _lock:
            state, _state = _state, None
        if state is not None:
            state.close(stops_agent=state.embedded is not _embedded)


def open_pool(config: EmsConfig, layout: str = "", socket: str | Path = "") -> KvPool:
    """A store of values by keys, beside or without `Ems.init`; close it, or use it as a context.

    layout: what tells how values are to be read, see KvPool. socket: of the agent; empty = the private agent of
    embedded() or `Ems.init` if there is one, else where agents serve. Connects at the first call.
    Raises EmsException(EMS_INVALID_ARGUMENT).
    """
    if socket:
        return KvPool(config, layout, lambda _deadline_s: Path(socket))
    private = _embedded or (_state.embedded if _state is not None else None)
    return KvPool(config, layout, private.locate if private is not None else locate_socket)


def _embedded_if_asked() -> EmbeddedAgent | None:
    """A private agent if EMS_EMBEDDED=1 and no agent is found."""
    if os.environ.get("EMS_EMBEDDED") != "1":
        return None
    path = find_socket()
    if path is not None and (os.environ.get("EMS_SOCKET") or is_served(path)):
        return None
    return EmbeddedAgent(_EMBEDDED_POOL)


def _start(agent: EmbeddedAgent) -> None:
    try:
        agent.start()
    except OSError as error:
        raise io_error(f"the embedded agent does not start: {error}") from error


@contextlib.contextmanager
def embedded(pool: str = _EMBEDDED_POOL, arguments: tuple[str, ...] = ()) -> Iterator[EmbeddedAgent]:
    """Within the context `Ems.init` uses a private agent with a pool of that size; at its end both are shut down.

    arguments: more of the agent's command line. Raises EmsException(EMS_IO_ERROR) when it does not start.
    """
    global _embedded
    agent = EmbeddedAgent(pool, arguments)
    _start(agent)
    _embedded = agent
    try:
        yield agent
    finally:
        Ems.shutdown()
        _embedded = None
        agent.stop()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    if _state is not None:
        _state.session.after_fork()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(Ems.shutdown)
