"""The socket that apps connect to. Only one daemon has it, and running out of descriptors does not make the daemon
spin.
"""

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

from kvloom.gewu.descriptors import has_free

log = logging.getLogger(__name__)

_BACKLOG = 128
_FIRST_PASSED_FD = 3  # systemd's socket activation
_PAUSE_S = 0.5
_LOOK_S = 2.0  # seconds between two looks whether the path is still there
Renewed = Callable[[], socket.socket | None]


class Listener:
    """A listening socket: systemd's, or a new one at `path`, for this user only.

    A locked file beside the socket shows that a daemon is alive; a killed daemon's socket is taken over. Raises OSError
    when another daemon listens there.
    """

    def __init__(self, path: Path) -> None:
        self._lock_fd: int | None = None
        self._inode: tuple[int, int] | None = None
        self._path = path
        self._is_missed = False  # whether the log says that the path was removed
        if os.environ.get("LISTEN_PID") == str(os.getpid()):
            self.socket = socket.socket(fileno=_FIRST_PASSED_FD)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock_fd = _lock(path)
        try:
            _clear(path)
            self.socket = _bind(path)
        except OSError:
            os.close(self._lock_fd)
            raise
        self._inode = _inode_of(path)

    def renewed(self) -> socket.socket | None:
        """Where the path was removed, so that no app can connect any more: another listening socket there, in place of
        `socket`, which the caller closes. None where nothing is missing, or the path cannot be had now.
        """
        if self._lock_fd is None or os.path.lexists(self._path):
            return None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if not _is_at(self._lock_fd, _lock_path(self._path)):  # the lock's file was removed, too
                before, self._lock_fd = self._lock_fd, _lock(self._path)
                os.close(before)
            fresh = _bind(self._path)
        except OSError as error:
            if not self._is_missed:
                self._is_missed = True
                log.error("%s was removed, and no app can connect: %s", self._path, error.strerror or error)
            return None
        self.socket, self._inode, self._is_missed = fresh, _inode_of(self._path), False
        log.warning("%s was removed; it is there again", self._path)
        return fresh

    def close(self) -> None:
        """Close and remove the socket, unless another process has replaced it. A second call does nothing."""
        self.socket.close()
        with contextlib.suppress(OSError):
            if self._inode is not None and _inode_of(self._path) == self._inode:
                self._path.unlink()
        lock_fd, self._lock_fd = self._lock_fd, None
        if lock_fd is not None:
            os.close(lock_fd)


def _lock(path: Path) -> int:
    """A descriptor that holds the lock while it is open. The file is never removed, which would be a race."""
    fd = os.open(_lock_path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise OSError(f"a daemon listens on {path} already") from None
    return fd


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _is_at(fd: int, path: Path) -> bool:
    """Whether an open file has this path."""
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except OSError:
        return False


def _clear(path: Path) -> None:
    """Remove the socket of a killed daemon. Raises OSError when a process without the lock listens there, or when what
    is there is no socket.
    """
    if path.exists() and not stat.S_ISSOCK(path.stat().st_mode):  # connecting to a file is refused as well
        raise OSError("what is there is no socket; set GEWU_SOCKET to a path of yours")
    with socket.socket(socket.AF_UNIX) as old:
        old.setblocking(False)  # a stopped process whose queue is full would answer never
        try:
            old.connect(str(path))
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:  # its queue is full
            pass
    raise OSError(f"a daemon listens on {path} already")


def _bind(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(mask)
    return listener


def _inode_of(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino


class Acceptor:
    """Calls `on_client` with each accepted socket. When out of descriptors it pauses, and logs so once."""

    def __init__(self, listener: socket.socket, on_client: Callable[[socket.socket], None]) -> None:
        self._listener = listener
        self._on_client = on_client
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._has_said_so = False
        listener.setblocking(False)
        self._resume()

    def close(self) -> None:
        self._loop.remove_reader(self._listener)
        if self._pause is not None:
            self._pause.cancel()

    def accept_at(self, listener: socket.socket) -> None:
        """Accept at another socket from now on, and close the present one."""
        self.close()
        self._listener.close()
        self._listener = listener
        listener.setblocking(False)
        self._resume()

    def _resume(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            if not has_free():
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            if not self._has_said_so:
                log.warning("cannot accept more clients (%s): they wait", error.strerror)
                self._has_said_so = True
            self._loop.remove_reader(self._listener)
            self._pause = self._loop.call_later(_PAUSE_S, self._resume)
            return
        self._has_said_so = False
        self._on_client(sock)


async def keep_reachable(acceptor: Acceptor, renewed: Renewed) -> None:
    """Look now and then whether apps still reach the listener, for ever."""
    while True:
        await asyncio.sleep(_LOOK_S)
        fresh = renewed()
        if fresh is not None:
            acceptor.accept_at(fresh)
