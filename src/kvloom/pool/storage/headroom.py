"""Headroom: keeps a pool from taking the last memory of its machine or container, whose kernel would end a process."""

import time

from kvloom.limits import available_bytes, memory_bytes

POOL_SHARE = 32  # blocks leave a 32nd of the machine's memory to everything else
STAGING_SHARE = 64  # staging areas leave half of that: a pool that has grown to its headroom can still be written to
_AGAIN_S = 1.0  # a refusal holds that long, because looking takes 0.1 ms


class Headroom:
    """May be called from any thread."""

    def __init__(self, share: int) -> None:
        """`share`: a `share`-th of the machine's memory stays free."""
        self._reserve = memory_bytes() // share
        self._refused, self._refused_until_s = "", 0.0

    def require(self, size: int) -> None:
        """Raises OSError when too little would be left beside `size` more bytes."""
        now_s = time.monotonic()
        if now_s >= self._refused_until_s:
            left = available_bytes()
            if left - size >= self._reserve:
                return
            self._refused = f"of {left >> 20} MiB that are available, {self._reserve >> 20} stay free"
            self._refused_until_s = now_s + _AGAIN_S
        raise OSError(self._refused)
