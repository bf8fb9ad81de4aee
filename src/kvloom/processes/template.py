"""Template: a process that has a program's imports, and forks children of its parent, which then have them too.

    Template.fork ── order, descriptors ──▶ template ── fork, fork ──▶ child, which its grandparent adopts

A template has one thread: kernels, tokenizers and logs start theirs in the child. A child has its own memory only where
it writes. All children of a template share one layout of addresses, as all of a zygote do.
"""

import atexit
import contextlib
import ctypes
import errno
import fcntl
import gc
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import msgspec

from kvloom.processes import childlog, inside

MAX_MESSAGE_BYTES, MAX_DESCRIPTORS = 1 << 18, 250
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)
_adopting = threading.Lock()


class Order(msgspec.Struct, array_like=True):
    """A child to be forked. The descriptors sent along get the numbers `targets` in it."""

    argv: list[str]
    targets: list[int]
    group: int  # process group; 0 = one of its own


def fork(sock: socket.socket, message: bytes, fds: Sequence[int]) -> int:
    """The process id of a new child of this process, which gets the message and the descriptors: forked by the template
    at the other end. Raises OSError.
    """
    with _adopting:  # meanwhile this process adopts descendants whose parent ends
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(sock, [message], fds)
            pid = int(sock.recv(32) or -errno.EPIPE)
        finally:
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    if pid < 0:
        raise OSError(-pid, os.strerror(-pid))
    return pid


class Forked:
    """A child that a template has forked, with what Popen has of one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """As Popen.poll."""
        with self._lock:
            if self.returncode is None:
                with contextlib.suppress(ChildProcessError):
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                    self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """As Popen.wait."""
        while (code := self.poll()) is None:
            process = os.pidfd_open(self.pid)
            try:
                ready = select.poll()
                ready.register(process, select.POLLIN)
                if not ready.poll(None if timeout is None else timeout * 1000):
                    raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            finally:
                os.close(process)
        return code

    def kill(self) -> None:
        """As Popen.kill."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


# -- the template, and what is forked


def forks(sock: socket.socket) -> Iterator[tuple[bytes, list[int]]]:
    """Fork a child for each message; yields it and its descriptors in the child only, once. In the template it ends
    with the parent.
    """
    sock.set_inheritable(False)
    gc.collect()
    gc.disable()
    gc.freeze()  # a collection would write to all objects, and so copy their memory
    sock.send(b"ready")
    while True:
        message, fds, _, _ = socket.recv_fds(sock, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        if not message:
            return
        try:
            between = os.fork()
        except OSError as error:
            sock.send(b"-%d" % (error.errno or errno.EAGAIN))
            between = -1
        if between == 0:
            _born(sock)
            yield message, fds
            return
        if between > 0 and os.waitpid(between, 0)[1]:
            sock.send(b"-%d" % errno.EAGAIN)
        for number in fds:
            os.close(number)


def _born(sock: socket.socket) -> None:
    """In the process between: fork again and end. Returns in the child, when it is adopted."""
    between = os.getpid()
    try:
        if os.fork():
            os._exit(0)
    except OSError:
        os._exit(1)
    while os.getppid() == between:
        time.sleep(0.0002)
    try:
        sock.send(b"%d" % os.getpid())
    except OSError:  # nobody is there any more
        os._exit(1)
    sock.close()
    gc.enable()


def become(order: Order, fds: Sequence[int]) -> None:
    """In a child: do what Popen does for one. All descriptors but the standard streams and those of the order close."""
    os.setpgid(0, order.group)
    take_over(fds, order.targets)
    show(order.argv)


def take_over(fds: Sequence[int], targets: Sequence[int]) -> None:
    """Give descriptors their numbers, and close all others but the standard streams."""
    above = max(2, *fds, *targets) + 1
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, above) for number in fds]
    os.closerange(3, above)
    for number, target in zip(moved, targets, strict=True):
        os.dup2(number, target)
        os.close(number)


def show(argv: Sequence[str]) -> None:
    """Set the command line that others see for this process, as far as there is room for it."""
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    shown = b"\0".join(map(os.fsencode, argv))[: end - begin - 1]
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, shown, len(shown))


def finish(run: Callable[[], object]) -> NoReturn:
    """Run a program, and exit as Python does, but without freeing all objects one by one, which takes most of the
    time.
    """
    status = 0
    try:
        run()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # there is none, or nobody reads it
            stream.flush()
    os._exit(status & 0xFF)


def main() -> None:
    """`python -m kvloom.processes.template SOCKET LEVEL`: the first message names modules; children run `main` of the
    first of them.
    """
    childlog.begin(int(sys.argv[2]))
    inside.begin()
    sock = socket.socket(fileno=int(sys.argv[1]))
    modules = [import_module(name) for name in sock.recv(MAX_MESSAGE_BYTES).decode().split()]
    for message, fds in forks(sock):
        order = msgspec.msgpack.decode(message, type=Order)
        become(order, fds)
        sys.argv = [str(modules[0].__file__), *order.argv[3:]]
        finish(modules[0].main)


if __name__ == "__main__":
    main()
