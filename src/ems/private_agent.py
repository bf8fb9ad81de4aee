"""Embedded mode: `kvloom pool agent` as a child process, for a quick start and for tests. Needs no root, no service.

The child ends when the last process that holds its standard input is gone, so a killed parent leaves nothing running.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

AGENT = (sys.executable, "-m", "kvloom", "pool", "agent")
_START_S = 60.0  # seconds; the first start on a machine compiles C++
_STOP_S = 5.0
_POLL_S = 0.01


class EmbeddedAgent:
    """Starts the agent at the first `locate`, and again if it died, until `stop`. Owned by the process that made it."""

    def __init__(self, pool: str, arguments: tuple[str, ...] = ()) -> None:
        """pool: its memory, such as "256M"; arguments: more of the agent's command line."""
        self._arguments = (f"--pool={pool}", "--no-prefault", "--ends-with-stdin", *arguments)
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._folder = ""
        self._is_stopped = False
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
            raise TimeoutError("the embedded agent is being ended")
        try:
            if self._is_stopped:
                raise ConnectionRefusedError("the embedded agent was ended")
            process = self._process
            if process is None or process.poll() is not None:
                process = self._process = self._start()
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

    def start(self) -> None:
        """Waits until the agent serves. Raises OSError when it does not."""
        self.locate(time.monotonic() + _START_S)

    def stop(self) -> None:
        """Ends the agent for good and removes its folder; in a forked child it does nothing."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._is_stopped = True
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
