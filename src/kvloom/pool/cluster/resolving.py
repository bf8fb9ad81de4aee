"""Lookup: the addresses of a peer's name, resolved within a deadline, which the system's resolver does not support."""

import socket
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from kvloom.net.listening import is_address

Addresses = list[tuple[str, int]]
_PATIENCE_S = 0.5  # a lookup that takes this long counts as a failure of the name


class UnknownName(OSError):
    """A name has no addresses, or they were not found in time."""


class Lookup:
    """Resolves one host. May be called from any thread; all share a lookup under way, which continues after they time
    out.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._lock = threading.Lock()
        self._under_way: Future[Addresses] | None = None

    def addresses(self, timeout_s: float) -> Addresses:
        """Addresses to try, in order. Raises UnknownName, or TimeoutError when there was hardly any time."""
        if is_address(self._host):
            return [(self._host, self._port)]
        try:
            return self._begun().result(timeout_s)
        except FutureTimeoutError:
            if timeout_s < _PATIENCE_S:
                raise TimeoutError("deadline passed") from None
            raise UnknownName("its name is not looked up in time") from None

    def _begun(self) -> "Future[Addresses]":
        """The lookup under way, or a new one if needed. Raises UnknownName when no thread is available."""
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
