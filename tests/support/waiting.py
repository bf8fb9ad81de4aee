"""Waiting for what other threads and processes do, which no event announces."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Far more than anything takes on a quiet machine: a busy one is no fault. tools/mutants.py waits for less.
WAIT_S = float(os.environ.get("KVLOOM_TEST_WAIT_S", "180"))


def soon() -> float:
    """A deadline for what is to succeed, far enough for a busy machine."""
    return time.monotonic() + WAIT_S


def is_locked_out(lock: Path) -> bool:
    """Whether somebody waits for this file's lock."""
    waits = f":{lock.stat().st_ino} "
    return any("->" in line and waits in line for line in Path("/proc/locks").read_text().splitlines())


def until(condition: Callable[[], Any], limit_s: float = WAIT_S) -> Any:
    """The condition's first true value, within `limit_s`. What takes long to look at is looked at less often."""
    deadline_s = time.monotonic() + limit_s
    while True:
        began_s = time.monotonic()
        if value := condition():
            return value
        now_s = time.monotonic()
        assert now_s < deadline_s, "it did not become true in time"
        time.sleep(min(max(0.005, 4 * (now_s - began_s)), 0.25))
