"""Listening sockets for all programs: the returned socket listens already, and an address in use is reported at once.

SO_REUSEADDR, without which a server could not restart for a minute, lets two programs bind one address as long as
neither listens, and an event loop that listens later may hide the error. So bind and listen happen together, before
anything slow.
"""

import contextlib
import errno
import fcntl
import ipaddress
import logging
import os
import resource
import socket
import stat
from collections.abc import Iterable
from pathlib import Path

from kvloom.contract.errors import UserError

log = logging.getLogger(__name__)

BACKLOG = 2048  # connections that wait to be accepted, also while a model is loaded
_TRIES = 20  # two programs that listen at the same moment may both be refused, although neither listens then
_PROBE_S = 1.0
_PROBLEMS = {
    errno.EADDRINUSE: "port {port} of {host} is in use by another program; stop that one or choose another port",
    errno.EACCES: "port {port} of {host} needs a right that this user does not have; choose a port above 1023",
    errno.EADDRNOTAVAIL: "{host} is not an address of this machine",
}


class ListenError(UserError, OSError):
    """An address cannot be listened on; one sentence that names it."""


def allow_descriptors() -> None:
    """Raise the soft limit of open descriptors, often 1,024, to the hard one: each connection takes a descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def listen(host: str, port: int, backlog: int = BACKLOG, option: str = "") -> socket.socket:
    """A listening TCP socket on an address or a name (its IPv4 address preferred); port 0 takes a free one.

    Raises ListenError, which names the option or key that gives the address, if one is told.
    """
    try:
        return _listening(host, port, backlog)
    except ListenError as error:
        if not option:
            raise
        raise ListenError(f"{option}: {error}") from None


def _listening(host: str, port: int, backlog: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError):
        raise ListenError(f"{host} is neither an address nor a known name") from None
    family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    for _ in range(_TRIES):
        listener = socket.socket(family, socket.SOCK_STREAM)
        is_bound = False
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            is_bound = True
            listener.listen(backlog)
            return listener
        except OSError as error:
            listener.close()
            if not (is_bound and error.errno == errno.EADDRINUSE):
                raise ListenError(_problem(host, port, error)) from None
    raise ListenError(_PROBLEMS[errno.EADDRINUSE].format(host=host, port=port))


def _problem(host: str, port: int, error: OSError) -> str:
    text = _PROBLEMS.get(error.errno or 0, "port {port} of {host} cannot be listened on: {reason}")
    return text.format(host=host, port=port, reason=error.strerror or error)


def own_names(hosts: Iterable[str]) -> frozenset[str]:
    """This machine's own names in lower case; none when `hosts` are loopback addresses only."""
    if all(is_loopback(host) for host in hosts):
        return frozenset()
    name = socket.gethostname().lower()
    short = name.partition(".")[0]
    return frozenset({name, short, f"{short}.local"})


def is_unspecified(host: str) -> bool:
    """Whether it stands for all addresses of a machine, so that no client can connect to it."""
    try:
        return not host or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address; the only name that counts is "localhost"."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_address(host: str) -> bool:
    """Whether it is an IP address, not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def bracketed(host: str) -> str:
    """A host in the form for URLs: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


class UnixListener:
    """A listening Unix socket, `socket`, at a path that is this process's own until `close`.

    A lock file beside it, whose lock ends with its holder, decides which process has the path; the socket of a killed
    holder is replaced.
    """

    def __init__(
        self, path: Path, mode: int, backlog: int = BACKLOG, group: int = -1, is_temporary: bool = False
    ) -> None:
        """`mode` of the socket, as 0o660; `group`: its id, -1 = this process's. Raises ListenError.

        Creates a missing folder, accessible to the group, or to all users if all may connect. `is_temporary`: `close`
        removes the lock file as well, and the folder if nothing else is in it.
        """
        self._path = path
        self._is_temporary = is_temporary
        self._is_missed = False  # whether the log says that the path was removed
        self._group = group
        try:
            if not path.parent.exists():
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o770)
                os.chown(path.parent, -1, group)
                path.parent.chmod(0o755 if mode & 0o006 else 0o750)
            self._lock = _lock_of(path)
        except OSError as error:
            raise ListenError(f"{path} cannot be listened on: {error.strerror or error}") from None
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._take(mode, backlog)
        except OSError as error:
            self.socket.close()
            os.close(self._lock)
            if isinstance(error, ListenError):
                raise
            raise ListenError(f"{path} cannot be listened on: {error.strerror or error}") from None

    def _take(self, mode: int, backlog: int) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ListenError(f"{self._path} is in use by another program") from None
        if self._path.exists() and not stat.S_ISSOCK(self._path.stat().st_mode):
            raise ListenError(f"{self._path} is there and is not a socket")
        if is_serving(self._path):  # a program that does not use the lock
            raise ListenError(f"{self._path} is in use by another program")
        self._mode, self._backlog = mode, backlog
        self._bind()

    def _bind(self) -> None:
        # clients connect as soon as the final name exists
        hidden = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        hidden.unlink(missing_ok=True)
        self.socket.bind(str(hidden))
        try:
            os.chown(hidden, -1, self._group)
            hidden.chmod(self._mode)
            self._inode = hidden.stat().st_ino
            self.socket.listen(self._backlog)
            hidden.replace(self._path)
        except OSError:
            hidden.unlink(missing_ok=True)
            raise

    def renewed(self) -> socket.socket | None:
        """Where the path was removed, so that nobody can connect any more: another listening socket there, in place of
        `socket`, which the caller closes. None where nothing is missing, or the path cannot be had now.
        """
        if os.path.lexists(self._path):
            return None
        before = self.socket
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
            if not _is_at(self._lock, _lock_path(self._path)):  # the lock's file was removed, too
                self._relock()
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._bind()
        except OSError as error:
            if self.socket is not before:
                self.socket.close()
            self.socket = before
            if not self._is_missed:
                self._is_missed = True
                log.error("%s was removed, and nobody can connect: %s", self._path, error.strerror or error)
            return None
        self._is_missed = False
        log.warning("%s was removed; it is there again", self._path)
        return self.socket

    def _relock(self) -> None:
        """Raises BlockingIOError when another program has the path's lock."""
        fresh = _lock_of(self._path)
        try:
            fcntl.flock(fresh, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fresh)
            raise
        os.close(self._lock)
        self._lock = fresh

    def close(self) -> None:
        """Stop listening, and remove the path if it is still this socket's."""
        with contextlib.suppress(OSError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()
        self.socket.close()
        if self._is_temporary:
            with contextlib.suppress(OSError):
                _lock_path(self._path).unlink()
                self._path.parent.rmdir()
        os.close(self._lock)


def _is_at(fd: int, path: Path) -> bool:
    """Whether an open file has this path."""
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except OSError:
        return False


def _lock_of(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.open(_lock_path(path), flags, 0o600)


def _lock_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def is_serving(path: Path) -> bool:
    """Whether a process accepts connections at a Unix socket's path."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True
