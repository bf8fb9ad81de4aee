"""Polling for changes in other threads and processes that no event announces."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Far more than anything takes on a quiet machine, so that a busy one fails no test. tools/mutants.py uses less.
WAIT_S = float(os.environ.get("KVLOOM_TEST_WAIT_S", "180"))


def soon() -> float:
    """A deadline for calls that succeed, late enough for a busy machine."""
    return time.monotonic() + WAIT_S


def is_locked_out(lock: Path) -> bool:
    """Whether a process waits for this file's lock."""
    waits = f":{lock.stat().st_ino} "
    return any("->" in line and waits in line for line in Path("/proc/locks").read_text().splitlines())


def until(condition: Callable[[], Any], limit_s: float = WAIT_S) -> Any:
    """The condition's first true value, within `limit_s`. Slow conditions are polled less often."""
    deadline_s = time.monotonic() + limit_s
    while True:
        began_s = time.monotonic()
        if value := condition():
            return value
        now_s = time.monotonic()
        assert now_s < deadline_s, "it did not become true in time"
        time.sleep(min(max(0.005, 4 * (now_s - began_s)), 0.25))
