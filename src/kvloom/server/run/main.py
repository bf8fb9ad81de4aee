"""From a configuration to a server on its sockets, in the order that lets it answer soonest.

The sockets listen first, so that an address in use is reported at once. Then the first model's process starts, and
meanwhile this process imports what the routes need; they answer 503 until the models are loaded.
"""

import contextlib
import gc
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import FrameType

from kvloom.contract.errors import BadRequest
from kvloom.net.listening import allow_descriptors, listen
from kvloom.server.config.settings import ServerConfig
from kvloom.server.run.loading import Loading, Opening
from kvloom.server.run.names import check_names
from kvloom.server.secure.api_keys import check_bind


def serve(config: ServerConfig, opening: Callable[[ServerConfig], Opening] = Loading) -> None:
    """Serve until a signal. Raises UserError, one sentence, when the server cannot start.

    `opening` begins to open the models; it is called once the sockets listen.
    """
    check_addresses(config)
    check_names(config)
    allow_descriptors()
    with _early_signals() as early, contextlib.ExitStack() as stack:
        gc.disable()  # a fifth of the time that imports take
        stack.callback(gc.enable)
        listeners = [stack.enter_context(each) for each in listen_all(config)]
        stack.enter_context(_pid_file(config.pid_file))
        loading = opening(config)
        stack.callback(loading.close)
        import_module("kvloom.server.run.compose").run(config, loading, listeners, early.hold)


class _Asked(BaseException):
    """Not KeyboardInterrupt: once that has passed an `exec`, CPython ends by SIGINT even where it was caught."""


class _EarlySignals:
    """Handler of SIGINT and SIGTERM while a server starts: ends the start by an exception.

    Code that is being imported may swallow it, so it is noted as well.
    """

    def __init__(self) -> None:
        self._is_asked, self._is_held = False, False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._is_asked = True
        if not self._is_held:
            raise _Asked

    def hold(self) -> bool:
        """From now on signals are only noted. Returns whether one has come."""
        self._is_held = True
        return self._is_asked


@contextlib.contextmanager
def _early_signals() -> Iterator[_EarlySignals]:
    """Handles signals until the server does it itself. One that comes ends the block."""
    early = _EarlySignals()
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, early) for number in (signal.SIGINT, signal.SIGTERM) if is_main}
    try:
        yield early
    except _Asked:
        pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def listen_all(config: ServerConfig) -> Iterator[socket.socket]:
    """A listening socket for each address of the configuration. Raises ListenError."""
    for key, (host, port) in config.addresses.items():
        yield listen(host, port, option="" if key == "port" else key)


def check_addresses(config: ServerConfig) -> None:
    """Raises AccessError for an address that listens on all networks, unless that is allowed."""
    for key, (host, _) in config.addresses.items():
        is_public = key == "port" or host == config.host
        check_bind(host, config.allows_all_addresses, "ipAddress" if is_public else "managementIpAddress")


@contextlib.contextmanager
def _pid_file(path: Path | None) -> Iterator[None]:
    """A context during which a file contains this process's id. Raises BadRequest when it cannot be written.

    At the end it is removed, unless another process has written its own id there.
    """
    if path is None:
        yield
        return
    own = f"{os.getpid()}\n"
    try:
        if path.exists() and not path.is_file():  # it would be removed at the end: /dev/null
            raise BadRequest("pid-file", f"{path} is no plain file")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(own)
    except OSError as error:
        raise BadRequest("pid-file", f"{path} cannot be written: {error.strerror}") from None
    try:
        yield
    finally:
        if path.is_file() and path.read_text(errors="replace") == own:
            path.unlink(missing_ok=True)
