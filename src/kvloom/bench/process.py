"""Starts a server for a measurement, times its first answer, reads its memory, and stops it at the end."""

import asyncio
import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from kvloom.bench.client import BenchError, Target, complete
from kvloom.processes.inside import signal_at_end_of_thread

_POLL_S = 0.01
_LISTENING = "0A"  # the state in /proc/net/tcp
_STOP_S = 15.0


class ServerProcess:
    """A command in a process group of its own, so that its children end with it. A context manager.

    The group stays in the session of its parent: when that ends, however it does, the system hangs up on a group
    with halted processes and lets them go on (POSIX, _exit(), of orphaned process groups), so that they can end.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._started_s = time.perf_counter()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=signal_at_end_of_thread,
            )
        except OSError as error:
            raise BenchError(f"{shlex.join(command)} cannot be started: {error.strerror}") from None

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        """End the process: SIGTERM first, SIGKILL after _STOP_S."""
        try:
            if self._process.poll() is None:
                self.set_running(True)
                self._process.terminate()
                self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._output.close()

    def first_answer_s(self, target: Target, limit_s: float, token_ids: Sequence[int]) -> float:
        """Seconds from the start to the first token. Raises BenchError if the process ends, or after `limit_s`."""
        while True:
            try:
                asyncio.run(complete(target, token_ids, 1))
                return time.perf_counter() - self._started_s
            except BenchError as error:
                if self._process.poll() is not None:
                    raise BenchError(f"the server ended before it answered: {self._last_line()}") from None
                if time.perf_counter() - self._started_s > limit_s:
                    raise BenchError(f"no answer within {limit_s:g} s: {error}") from None
            time.sleep(_POLL_S)

    @property
    def pid(self) -> int:
        return self._process.pid

    def peak_rss_bytes(self) -> int:
        return peak_rss_bytes(self.pid)

    def set_running(self, is_running: bool) -> None:
        """Halt it and its descendants, or let them continue: even idle servers take part of a core."""
        for pid in family(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT if is_running else signal.SIGSTOP)

    def _last_line(self) -> str:
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "without a word")


def serve_command(model: str, port: int, options: Sequence[str] = ()) -> list[str]:
    """`kvloom serve` of this installation; "" is the demo model."""
    named = [model] if model else []
    return [sys.executable, "-m", "kvloom.cli", "serve", *named, "--port", str(port), *options]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def family(pid: int) -> list[int]:
    """Ids of a process and its living descendants; of the process alone where there is no /proc."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        fields = _status(status)
        if "PPid" in fields:
            children.setdefault(int(fields["PPid"]), []).append(int(status.parent.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def peak_rss_bytes(pid: int) -> int:
    """Highest resident memory (VmHWM) of a process and its living descendants, added up; 0 where there is no /proc."""
    sizes = (_status(Path(f"/proc/{one}/status")).get("VmHWM", "0 kB") for one in family(pid))
    return sum(int(size.split()[0]) * 1024 for size in sizes)


def listener_pid(port: int) -> int | None:
    """Id of the process that listens on a TCP port of this machine; None if it is not visible (or without /proc)."""
    inodes = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            _, local, _, state, *_, inode = line.split()[:10]
            if state == _LISTENING and int(local.rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{inode}]")
    for folder in Path("/proc").glob("[0-9]*/fd"):
        try:
            files = list(folder.iterdir())
        except OSError:  # the process has ended, or is another user's
            continue
        if any(_target(file) in inodes for file in files):
            return int(folder.parent.name)
    return None


def _target(link: Path) -> str:
    """What a symbolic link names; "" when it is gone, as that of a descriptor that was closed meanwhile."""
    try:
        return os.readlink(link)
    except OSError:
        return ""


def _status(path: Path) -> dict[str, str]:
    """Fields of a process's status file; empty when it has ended."""
    try:
        return dict(line.split(":\t", 1) for line in path.read_text().splitlines() if ":\t" in line)
    except OSError:
        return {}
