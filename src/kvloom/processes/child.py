"""Child: a process that this one starts, speaks to, watches and ends. Its side begins with `inside.begin`.

A Program is one that is not spoken to through a socket of its own.
"""

import contextlib
import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from errno import EAGAIN, EMFILE, ENFILE, ENOMEM
from socket import SOCK_SEQPACKET, SOCK_STREAM
from typing import IO

import msgspec

from kvloom.contract.errors import ModelError
from kvloom.processes import childlog
from kvloom.processes.inside import THE_PARENTS
from kvloom.processes.template import Forked, Order, fork

log = logging.getLogger(__name__)

_REFUSED = (EAGAIN, ENOMEM, EMFILE, ENFILE)  # what the system says that has no processes, memory or descriptors left
_IMPORTS = 4  # times silence_s that a process may be silent while it imports
_LOG_S = 1.0  # seconds for the last lines of a child's log
Words = Callable[[int, int], Sequence[str]]  # (number of the child's socket, log level) -> its arguments


class Died(Exception):
    """A child has ended, or is silent for too long."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What holds for every child of one kind: a row of kinds.py."""

    people: str  # what it is called where people read how it ended
    command: tuple[str, ...]
    leads_group: bool = False  # Ctrl-C, for this process and its group, does not reach it; it is killed with its group
    exit_s: float = 1.0  # seconds that it gets to end by itself
    silence_s: float = 300.0  # seconds without a sign of life after which it counts as hung
    environ: Mapping[str, str] = field(default_factory=dict)  # besides this process's
    socket: int = SOCK_STREAM  # type of the socket; SOCK_SEQPACKET where descriptors go with messages
    imports: str = ""  # of its template, if it may have one: modules, the program's own first
    is_quiet: bool = False  # what it writes to standard output goes nowhere

    @property
    def silent(self) -> str:
        """Why a child that hangs is killed, for people."""
        return f"{self.people} gave no sign of life for {self.silence_s:g} s"


def usual_words(number: int, level: int) -> Sequence[str]:
    """The arguments of most kinds."""
    return str(number), str(level)


class Program:
    """A running process. It ends with this process."""

    def __init__(
        self,
        kind: Kind,
        who: str,
        words: Sequence[str] = (),
        fds: Sequence[int] = (),
        template: "Template | None" = None,
    ) -> None:
        """`who`: its name in the log; words: arguments besides the kind's. It inherits `fds`. With a template it is
        forked from that. Raises OSError.
        """
        self.kind = kind
        self._process, stderr = _begun(kind, [*kind.command, *words], fds, template)
        try:
            self._log = childlog.relay(stderr, who)
        except RuntimeError as error:  # the system has no thread for it
            stderr.close()
            self.kill()
            self._process.wait()
            raise OSError(EAGAIN, str(error)) from None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the signal's number when a signal ended it."""
        return self._process.poll()

    def kill(self) -> None:
        """Kill it, and its group if it leads one, without waiting. May be called from any thread."""
        if self.kind.leads_group:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()  # it may not lead its group yet

    def end(self) -> None:
        """Wait until it ends, which a child does when its socket is closed; kill it, and what is left of its group,
        after `exit_s`.
        """
        self._waited()
        self.kill()
        self._process.wait()
        self._log.join(_LOG_S)

    def close(self) -> None:
        """Ask it to end (SIGTERM), then `end`."""
        if self.exit_code is None:
            os.kill(self.pid, signal.SIGTERM)
        self.end()

    @property
    def last_line(self) -> str:
        """What it wrote last, when it has ended; "" if nothing."""
        self._log.join(_LOG_S)
        return self._log.last_line

    def reason(self) -> str:
        """How it ended, for people. Waits for one that is just ending."""
        self._waited()
        return ended(self.kind.people, self.exit_code)

    def _waited(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self.kind.exit_s)


class Child(Program):
    """A Program, and this process's end of its socket."""

    def __init__(
        self,
        kind: Kind,
        who: str,
        words: Words = usual_words,
        fds: Sequence[int] = (),
        template: "Template | None" = None,
    ) -> None:
        """See Program; it inherits its socket too."""
        ends = (end.detach() for end in socket.socketpair(socket.AF_UNIX, kind.socket))
        self.sock, theirs = (socket.socket(fileno=_above_standard(end)) for end in ends)
        with theirs:
            number = theirs.fileno()
            try:
                super().__init__(kind, who, words(number, childlog.level()), (number, *fds), template)
            except BaseException:
                self.sock.close()
                raise

    def close(self) -> None:
        """Close its socket, then `end`."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
        self.end()


class Template:
    """A process that forks children (template.py). It is started at the first `fork`, and again after it has died. Any
    thread may use it.
    """

    def __init__(self, begin: "Callable[[], Child]") -> None:
        """`begin` starts the process. Raises OSError."""
        self._begin = begin
        self._lock = threading.Lock()
        self._child: Child | None = None

    @classmethod
    def of(cls, kind: Kind) -> "Template":
        """One that has imported what `kind` says."""
        own = replace(
            kind,
            people=f"the template of {kind.people}",
            command=(sys.executable, "-m", "kvloom.processes.template"),
            leads_group=True,
            socket=SOCK_SEQPACKET,
            silence_s=_IMPORTS * kind.silence_s,
        )

        def begin() -> Child:
            child = Child(own, "template")
            child.sock.send(kind.imports.encode())
            return child

        return cls(begin)

    @property
    def pids(self) -> list[int]:
        """Of the process, when there is one."""
        return [] if (child := self._child) is None else [child.pid]

    def fork(self, argv: list[str], fds: Sequence[int], stderr: int, group: int) -> Forked:
        """A new child of this process with these descriptors, in this process group. Raises OSError."""
        order = msgspec.msgpack.encode(Order(argv, [0, 2, *fds], group))
        given = [lifeline(), stderr, *fds]
        with self._lock:
            try:
                return Forked(fork(self._started(), order, given))
            except ConnectionError:  # it has died before
                self._end()
                return Forked(fork(self._started(), order, given))
            except OSError:
                self._end()
                raise

    def start(self) -> None:
        """Start the process before the first `fork`. Raises OSError."""
        with self._lock:
            self._started()

    def close(self) -> None:
        """End the process; children keep running."""
        with self._lock:
            self._end()

    def _started(self) -> socket.socket:
        if self._child is None:
            self._child = self._begin()
            self._child.sock.settimeout(self._child.kind.silence_s)
            if not self._child.sock.recv(32):
                raise ConnectionResetError(self._child.reason())
        return self._child.sock

    def _end(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.close()
            self._child = None


def _above_standard(number: int) -> int:
    """The descriptor under a number that is not a standard stream's, which this process may have closed."""
    if number > 2:
        return number
    moved = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(number)
    return moved


def _begun(
    kind: Kind, argv: list[str], fds: Sequence[int], template: Template | None
) -> "tuple[subprocess.Popen[bytes] | Forked, IO[bytes]]":
    """The process, and what it writes to standard error. Raises OSError."""
    read, write = map(_above_standard, os.pipe())
    try:
        return _process(kind, argv, fds, write, template), os.fdopen(read, "rb")
    except BaseException:
        os.close(read)
        raise
    finally:
        os.close(write)


def _process(
    kind: Kind, argv: list[str], fds: Sequence[int], stderr: int, template: Template | None
) -> "subprocess.Popen[bytes] | Forked":
    """Raises OSError."""
    if template is not None:
        try:
            return template.fork(argv, fds, stderr, 0 if kind.leads_group else os.getpgid(0))
        except OSError as error:
            if not kind.imports:  # it can be forked only
                raise
            log.warning("%s is started without its template: %s", kind.people, error)
    with signals_held_at_start():
        return subprocess.Popen(
            argv,
            pass_fds=fds,
            stdin=lifeline(),
            stdout=subprocess.DEVNULL if kind.is_quiet else None,
            stderr=stderr,
            env={**os.environ, **kind.environ},
            process_group=0 if kind.leads_group else None,
        )


def ended(people: str, code: int | None) -> str:
    """How a process with this exit code ended, for people; None = it still runs but does not answer."""
    if code is None:
        return f"{people} closed its connection"
    return f"{people} was killed by signal {-code}" if code < 0 else f"{people} exited with {code}"


@contextmanager
def starting(model: str, reason: Callable[[], str], close: Callable[[], None]) -> Iterator[None]:
    """A context around the first messages to and from new children: on any failure they are closed.

    Raises ModelError, with the reason, when one of them has died.
    """
    try:
        yield
    except (Died, OSError, EOFError) as error:
        why = _why(error) or reason()
        close()
        raise ModelError(f"loading {model or 'the model'} failed: {why}") from error
    except BaseException:
        close()
        raise


def _why(error: Exception) -> str:
    """Why children do not start, if it is not that one of them has ended; else ""."""
    if isinstance(error, Died):
        return str(error)
    if isinstance(error, OSError) and error.errno in _REFUSED:
        return f"the system has no room for its process: {error.strerror}"
    return ""


_lock = threading.Lock()
_ends: list[int] = []  # of this process's pipe: to read from, to write to


def lifeline() -> int:
    """For a child's standard input: a pipe whose other end this process holds, and never writes to, until it ends.

    A child that has called `inside.begin` then ends with this process, whichever thread has started it. It works for
    all children of a process, and must not be closed.
    """
    with _lock:
        if not _ends:
            _ends.extend(_above_standard(end) for end in os.pipe())
        return _ends[0]


def _after_fork() -> None:
    """A forked child has a pipe of its own: else the parent's children would outlive the parent with it."""
    global _lock
    _lock = threading.Lock()
    for end in _ends:
        os.close(end)
    _ends.clear()


os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def signals_held_at_start() -> Iterator[None]:
    """Processes started inside this context have the parent's signals blocked until `inside.begin`.

    Otherwise a signal during a child's imports would end it with a traceback. In this thread the signals are blocked
    too.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, THE_PARENTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
