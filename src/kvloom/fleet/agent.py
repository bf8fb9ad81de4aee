"""The EMS agent of a node, which holds blocks for all replicas there: a running one, or one started for the fleet."""

import contextlib
import fcntl
import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from ems.common.sockets import candidates, serving_path
from kvloom.contract.config import TierConfig
from kvloom.contract.errors import ModelError
from kvloom.pool.doctor import is_answered
from kvloom.processes import kinds
from kvloom.processes.child import Program
from kvloom.processes.keeper import Keeper

FACTORY = "kvloom.rank.tier.ems:open_tier"
_START_S = 60.0  # seconds; the first start on a machine compiles C++
_POLL_S = 0.05
_LOOK_S = 10.0  # seconds between two looks whether it answers

log = logging.getLogger(__name__)


def pool_tier(configured: TierConfig | None) -> TierConfig:
    """How ranks reach the pool; as kvPoolConfig says, where there is one."""
    return configured or TierConfig(FACTORY)


class NodeAgent:
    """Holds the agent that it started, or nothing where one was running. Lives as long as its process."""

    def __init__(self, pool_bytes: int) -> None:
        """Raises ModelError, one sentence, when no agent runs and none can be started."""
        self._pool_bytes = pool_bytes
        self._program: Program | None = None
        self._keeper = Keeper(kinds.AGENT.silence_s)
        self._is_closed = threading.Event()
        with _alone():
            if not any(path.exists() and is_answered(path) for path in candidates()):
                self._program = _started(pool_bytes)
                threading.Thread(target=self._watch, name="agent", daemon=True).start()

    @property
    def pid(self) -> int | None:
        """Of the agent that it started."""
        return None if self._program is None else self._program.pid

    def check(self) -> None:
        """Raises ModelError when the agent that it started has ended, and is not started again yet."""
        if self._program is not None and self._program.exit_code is not None:
            raise ModelError(self._program.reason())

    def close(self) -> None:
        self._is_closed.set()
        if self._program is not None:
            self._program.close()

    def _watch(self) -> None:
        while not self._is_closed.wait(_LOOK_S):
            self.look()

    def look(self) -> None:
        """Called every _LOOK_S: starts the agent again if it has ended, or is silent."""
        assert self._program is not None
        self._keeper.passed(_LOOK_S)
        if self._program.exit_code is None:
            if is_answered(serving_path()):
                self._keeper.heard(is_answer=True)
            if not self._keeper.is_hung:
                return
            log.error("%s; it is started again", kinds.AGENT.silent)
            self._program.kill()
        else:
            log.error("%s; it is started again", self._program.reason())
        self._program.end()
        self._keeper = Keeper(kinds.AGENT.silence_s)
        try:
            self._program = _started(self._pool_bytes)
        except ModelError as error:
            log.error("%s", error)  # the next look tries again


def _started(pool_bytes: int) -> Program:
    try:
        program = Program(kinds.AGENT, "EMS agent", ["--pool", str(pool_bytes)])
    except OSError as error:
        raise ModelError(f"the EMS agent did not start: {error}") from None
    deadline_s = time.monotonic() + _START_S
    while not is_answered(serving_path()):
        if program.exit_code is not None or time.monotonic() > deadline_s:
            why = program.reason()
            program.kill()
            program.end()
            raise ModelError(f"the EMS agent did not start: {program.last_line or why}")
        time.sleep(_POLL_S)
    return program


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """A lock of this node."""
    with (Path(tempfile.gettempdir()) / f"kvloom-fleet-agent-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
