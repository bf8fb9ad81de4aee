"""Staging: the memory of all sessions' staging areas together. May be called from any thread."""

import threading
import time

from kvloom.pool.storage.headroom import STAGING_SHARE, Headroom

_SHARE = 32  # a session gets at most 1 / it of what is left, so that a hundred others find some too;
_BLOCKS, _SHARE_OF_BLOCKS = 4, 16  # or so many blocks, if they are 1 / it of that: fewer would wait for each other


class Staging:
    """Bytes for staging areas; a session that finds too little waits until others end."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.headroom = Headroom(STAGING_SHARE)
        self.used_bytes = 0
        self._changed = threading.Condition()

    def take(self, size: int, least: int, deadline_s: float) -> int:
        """Reserve `size` bytes, or fewer if little is left, but at least `least`. Returns how many; 0 = none until the
        deadline.
        """
        with self._changed:
            if least > self.total_bytes:
                return 0
            left_s = max(0.0, deadline_s - time.monotonic())
            if not self._changed.wait_for(lambda: self.total_bytes - self.used_bytes >= least, left_s):
                return 0
            left = self.total_bytes - self.used_bytes
            taken = max(least, min(size, max(left // _SHARE, min(_BLOCKS * least, left // _SHARE_OF_BLOCKS))))
            self.used_bytes += taken
            return taken

    def give_back(self, size: int) -> None:
        """Free `size` reserved bytes."""
        with self._changed:
            self.used_bytes -= size
            self._changed.notify_all()
