"""Profiling (spec ems 6.2): with ENABLE_CC_PROFILING=1 each call leaves a JSON line in the folder EMS_SDK_LOG."""

import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import IO

DEFAULT_FOLDER = "/var/log/ems"
_log = logging.getLogger("ems")


class Profiler:
    """Writes lines, or nothing when profiling is off or the folder cannot be written. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file: IO[bytes] | None = None
        self.is_on = os.environ.get("ENABLE_CC_PROFILING") == "1"

    def after_fork(self) -> None:
        """In a forked child: a file of its own; a thread of the parent may have held the lock."""
        self._lock = threading.Lock()
        self.close()

    def record(self, operation: str, total: int, success: int, num_bytes: int, start_s: float) -> None:
        """One call: blocks asked for and done, bytes moved, and the time since `start_s` (monotonic)."""
        if not self.is_on:
            return
        line = {
            "time": round(time.time(), 6),
            "operation": operation,
            "total": total,
            "success": success,
            "bytes": num_bytes,
            "duration_ms": round((time.monotonic() - start_s) * 1000, 3),
        }
        with self._lock:
            if self._file is None:
                self._open()
            if self._file is not None:
                self._file.write(json.dumps(line).encode() + b"\n")

    def _open(self) -> None:
        folder = Path(os.environ.get("EMS_SDK_LOG") or DEFAULT_FOLDER)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / f"ems_profiling_{os.getpid()}.log").open("ab", buffering=0)
        except OSError as error:
            self.is_on = False
            _log.warning("profiling is off: %s", error)

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None
