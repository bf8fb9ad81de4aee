"""Lookup: the addresses behind a peer's name, found within a deadline; the system's own lookup knows none."""

import socket
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from kvloom.net.listening import is_address

Addresses = list[tuple[str, int]]
_PATIENCE_S = 0.5  # a lookup that took this long is the name's fault


class UnknownName(OSError):
    """There are no addresses for a name, or none in time."""


class Lookup:
    """Of one host. Any thread may call; a lookup that lasts is waited for by all, and goes on when they gave up."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._lock = threading.Lock()
        self._under_way: Future[Addresses] | None = None

    def addresses(self, timeout_s: float) -> Addresses:
        """Those to try, in order. Raises UnknownName, or TimeoutError where there was hardly any time."""
        if is_address(self._host):
            return [(self._host, self._port)]
        try:
            return self._begun().result(timeout_s)
        except FutureTimeoutError:
            if timeout_s < _PATIENCE_S:
                raise TimeoutError("deadline passed") from None
            raise UnknownName("its name is not looked up in time") from None

    def _begun(self) -> "Future[Addresses]":
        """The lookup that is under way, if need be a new one. Raises UnknownName where no thread can be had."""
        with self._lock:
            if self._under_way is None:
                future = Future[Addresses]()
                try:
                    threading.Thread(target=self._run, args=(future,), name="ems-lookup", daemon=True).start()
                except RuntimeError as error:
                    raise UnknownName(f"its name cannot be looked up: {error}") from None
                self._under_way = future
            return self._under_way

    def _run(self, future: "Future[Addresses]") -> None:
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            result, problem = [(str(address[0]), int(address[1])) for *_, address in found], None
        except (OSError, UnicodeError) as error:
            result, problem = (
                [],
                UnknownName(f"its name cannot be looked up: {getattr(error, 'strerror', None) or error}"),
            )
        with self._lock:
            self._under_way = None
        if problem is None:
            future.set_result(result)
        else:
            future.set_exception(problem)
