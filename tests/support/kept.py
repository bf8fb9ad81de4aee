"""Results that take long to compute: made once, by the first process that needs them, and kept in the user's cache
for other checkouts and later runs. Entries that were not used for a week are deleted.
"""

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

MADE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvloom-tests"
KEPT_S = 7 * 86400


def kept(causes: Iterable[bytes], name: str, make: Callable[[Path], object]) -> Path:
    """The file or folder `name` that `make` creates at a given path; `causes` are all the inputs that it depends on."""
    digest = hashlib.sha256()
    for cause in causes:
        digest.update(len(cause).to_bytes(8, "little") + cause)
    target = MADE / digest.hexdigest()[:16] / name
    target.parent.mkdir(parents=True, exist_ok=True)
    os.utime(target.parent)
    with (target.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            part = target.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)  # of a run that was killed while making it
            make(part)
            part.rename(target)
            _forget_old()
    return target


def _forget_old() -> None:
    for folder in MADE.iterdir():
        if folder.stat().st_mtime < time.time() - KEPT_S:
            shutil.rmtree(folder, ignore_errors=True)
