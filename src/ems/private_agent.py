"""Embedded mode: `kvloom pool agent` as a child process, for a quick start and for tests. Needs no root, no service.

The child ends when the last process that holds its standard input is gone, so a killed parent leaves nothing running. A
child that hangs is killed, and another one is started.
"""

import importlib.util
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from ems.common.channel import CHANNEL_ERRORS, Channel
from ems.keys import NONCE_BYTES
from ems.wire import messages as m

_log = logging.getLogger("ems")

AGENT = (sys.executable, "-m", "kvloom", "pool", "agent")
_START_S = 60.0  # seconds; the first start on a machine compiles C++
_STOP_S = 5.0
_POLL_S = 0.01
_LOOK_S = 10.0  # seconds between two looks whether it answers, and until it must
_MAX_SILENT = 3  # looks without an answer after which it is killed


class EmbeddedAgent:
    """Starts the agent at the first `locate`, and again if it died, until `stop`. Owned by the process that made it."""

    def __init__(self, pool: str, arguments: tuple[str, ...] = ()) -> None:
        """pool: its memory, such as "256M"; arguments: more of the agent's command line."""
        self._arguments = (f"--pool={pool}", "--no-prefault", "--ends-with-stdin", *arguments)
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._folder = ""
        self._is_stopped = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the running agent. Raises OSError when there is none."""
        if self._process is None:
            raise ConnectionRefusedError("the embedded agent does not run")
        return self._process.pid

    def locate(self, deadline_s: float) -> Path:
        """The socket of a running agent. Raises OSError when it cannot be started, TimeoutError when not in time."""
        if os.getpid() != self._owner:
            return Path(self._folder) / "ems.sock"
        limit_s = max(deadline_s, time.monotonic() + 0.001)
        process, path = self._running(limit_s)
        while not path.exists():
            if process.poll() is not None:
                raise ConnectionRefusedError("the embedded agent ended while starting")
            if time.monotonic() > limit_s:
                raise TimeoutError("the embedded agent is still starting")
            time.sleep(_POLL_S)
        return path

    def _running(self, limit_s: float) -> "tuple[subprocess.Popen[bytes], Path]":
        """The agent, which is started if it does not run, and where its socket is or will be. Raises OSError."""
        if not self._lock.acquire(timeout=max(0.0, limit_s - time.monotonic())):
            raise TimeoutError("the embedded agent is being started, or ended")
        try:
            if self._is_stopped.is_set():
                raise ConnectionRefusedError("the embedded agent was ended")
            process = self._process
            if process is None or process.poll() is not None:
                process = self._process = self._start()
                path = Path(self._folder) / "ems.sock"
                threading.Thread(target=self._watch, args=(process, path), name="ems-watch", daemon=True).start()
            return process, Path(self._folder) / "ems.sock"
        finally:
            self._lock.release()

    def _start(self) -> "subprocess.Popen[bytes]":
        if importlib.util.find_spec("kvloom") is None:
            raise FileNotFoundError("the embedded agent is kvloom's, which is not installed here")
        self._clean()
        self._folder = tempfile.mkdtemp(prefix="ems-")
        source = str(Path(__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH", ""))))
        return subprocess.Popen(
            [*AGENT, f"--socket={self._folder}/ems.sock", *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C for the engine must not end its cache
        )

    def _watch(self, process: "subprocess.Popen[bytes]", path: Path) -> None:
        """Kill the agent if it has begun to serve and then answers nothing, until it has ended."""
        num_silent = 0
        while not self._is_stopped.wait(_LOOK_S) and process.poll() is None:
            num_silent = num_silent + 1 if path.exists() and not _answers(path) else 0
            if num_silent == _MAX_SILENT:
                _log.error("the embedded agent has not answered for %g s, and is started again", num_silent * _LOOK_S)
                process.kill()
                process.wait()

    def start(self) -> None:
        """Waits until the agent serves. Raises OSError when it does not."""
        self.locate(time.monotonic() + _START_S)

    def stop(self) -> None:
        """Ends the agent for good and removes its folder; in a forked child it does nothing."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._is_stopped.set()
            process, self._process = self._process, None
            if process is not None:
                if process.stdin is not None:
                    process.stdin.close()
                try:
                    process.wait(_STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            self._clean()

    def _clean(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = ""


def _answers(path: Path) -> bool:
    """Whether an agent greets on this socket within _LOOK_S."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(_LOOK_S)
        try:
            sock.connect(str(path))
            channel, deadline_s = Channel(sock), time.monotonic() + _LOOK_S
            channel.send(m.Hello("", bytes(NONCE_BYTES)), deadline_s)
            return isinstance(channel.receive(deadline_s).message, m.Challenge)
        except CHANNEL_ERRORS:
            return False
