"""The EMS agent of a node, which holds blocks for all replicas there: a running one, or one started for the fleet."""

import contextlib
import fcntl
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from ems.common.sockets import candidates, serving_path
from kvloom.contract.config import TierConfig
from kvloom.contract.errors import ModelError
from kvloom.pool.doctor import is_answered
from kvloom.processes.child import ended, lifeline
from kvloom.processes.keeper import Keeper

FACTORY = "kvloom.rank.tier.ems:open_tier"
_START_S = 60.0  # seconds; the first start on a machine compiles C++
_POLL_S = 0.05
_LOOK_S, _SILENCE_S = 10.0, 30.0  # seconds between two looks, and without an answer until it is killed
_PEOPLE = "the EMS agent"

log = logging.getLogger(__name__)


def pool_tier(configured: TierConfig | None) -> TierConfig:
    """How ranks reach the pool; as kvPoolConfig says, where there is one."""
    return configured or TierConfig(FACTORY)


class NodeAgent:
    """Holds the agent that it started, or nothing where one was running. Lives as long as its process."""

    def __init__(self, pool_bytes: int) -> None:
        """Raises ModelError, one sentence, when no agent runs and none can be started."""
        self._pool_bytes = pool_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper = Keeper(_SILENCE_S)
        self._is_closed = threading.Event()
        with _alone():
            if not any(path.exists() and is_answered(path) for path in candidates()):
                self._process = _started(pool_bytes)
                threading.Thread(target=self._watch, name="agent", daemon=True).start()

    @property
    def pid(self) -> int | None:
        """Of the agent that it started."""
        return None if self._process is None else self._process.pid

    def check(self) -> None:
        """Raises ModelError when the agent that it started has ended, and is not started again yet."""
        if self._process is not None and self._process.poll() is not None:
            raise ModelError(ended(_PEOPLE, self._process.returncode))

    def close(self) -> None:
        self._is_closed.set()
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def _watch(self) -> None:
        while not self._is_closed.wait(_LOOK_S):
            self.look()

    def look(self) -> None:
        """Called every _LOOK_S: starts the agent again if it has ended, or has not answered for _SILENCE_S."""
        assert self._process is not None
        self._keeper.passed(_LOOK_S)
        if self._process.poll() is None:
            if is_answered(serving_path()):
                self._keeper.heard(is_answer=True)
            if not self._keeper.is_hung:
                return
            log.error("%s has not answered for %g s, and is started again", _PEOPLE, _SILENCE_S)
            self._process.kill()
            self._process.wait()
        else:
            log.error("%s; it is started again", ended(_PEOPLE, self._process.returncode))
        self._keeper = Keeper(_SILENCE_S)
        try:
            self._process = _started(self._pool_bytes)
        except ModelError as error:
            log.error("%s", error)  # the next look tries again


def _started(pool_bytes: int) -> "subprocess.Popen[bytes]":
    log = Path(tempfile.gettempdir()) / f"kvloom-fleet-agent-{os.getuid()}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvloom", "pool", "agent", "--pool", str(pool_bytes), "--ends-with-stdin"],
            stdin=lifeline(),  # however this process ends
            stdout=output,
            stderr=output,
        )
    deadline_s = time.monotonic() + _START_S
    while not is_answered(serving_path()):
        if process.poll() is not None or time.monotonic() > deadline_s:
            process.kill()
            process.wait()
            lines = log.read_text(errors="replace").strip().splitlines()
            raise ModelError(f"the EMS agent did not start: {lines[-1] if lines else f'see {log}'}")
        time.sleep(_POLL_S)
    return process


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """A lock of this node."""
    with (Path(tempfile.gettempdir()) / f"kvloom-fleet-agent-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
