"""Coming: a long load from other nodes on a thread of its own, so that its first blocks are used while the rest
arrives.
"""

import threading
import time

from ems.wire.messages import Cause
from kvloom.pool.node import Others
from kvloom.pool.storage.passing import Held, Offered
from kvloom.pool.storage.pool import Pool


class Coming:
    """One waiter. Ends by itself at its deadline, and then keeps nothing pinned."""

    def __init__(self, others: Others, pool: Pool, keys: list[bytes], deadline_s: float) -> None:
        """Begins. Raises RuntimeError when no thread is available."""
        self._others = others
        self._pool = pool
        self._keys = keys
        self._number = {key: number for number, key in enumerate(keys)}
        self._deadline_s = deadline_s
        self._changed = threading.Condition()
        self._num_bytes = 0  # bytes that arrived and were not reported yet
        self._is_awaited = self._is_stopped = self._is_over = False
        self._pinned: list[Offered | Held] = []
        self.problem = Cause.NONE
        self.block_bytes = 0  # bytes of the largest block that arrived
        threading.Thread(target=self._run, name="ems-coming", daemon=True).start()

    def covers(self, keys: list[bytes]) -> bool:
        """Whether it loads these keys, or has found them missing. Complete blocks may have been evicted since."""
        if self._is_over and not self.problem:
            return False
        first = self._number.get(keys[0])
        return first is not None and self._keys[first:] == keys

    def hold(self, keys: list[bytes], num_bytes: int) -> tuple[Held, bool]:
        """Wait until `num_bytes` more have arrived, one block at least, or nothing more will. Returns the prefix of
        `keys` that is here, and whether it is final.
        """
        with self._changed:
            self._is_awaited = True
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._is_over or self._num_bytes >= num_bytes)
                    is_over, self._num_bytes = self._is_over, 0
                held = self._pool.hold_prefix(keys)
                if is_over or len(held):
                    return held, is_over
        finally:
            with self._changed:
                self._is_awaited = False
                is_over = self._is_over
            if is_over:
                self._unpin()

    def stop(self) -> None:
        """The rest is not needed; what was requested may still arrive."""
        self._is_stopped = True

    def _run(self) -> None:
        pinned, problem = list[Offered | Held](), Cause.PEER_DOWN
        try:
            # What lies behind a hole stays pinned meanwhile: arriving blocks evict others.
            pinned.append(here := self._pool.offer(self._keys))
            missing = [key for key, length in zip(self._keys, here.lengths, strict=True) if not length]
            if time.monotonic() >= self._deadline_s:
                problem = Cause.TIMEOUT
            else:
                fetched = self._others.fetch(self._pool, missing, self._deadline_s, True, self._came)
                problem, self.block_bytes = fetched.problem, fetched.block_bytes
                pinned += fetched.held
        finally:
            with self._changed:
                self._pinned, self.problem, self._is_over = pinned, problem, True
                is_awaited = self._is_awaited
                self._changed.notify_all()
            if not is_awaited:
                self._unpin()

    def _came(self, size: int) -> bool:
        with self._changed:
            self._num_bytes += size
            self._changed.notify_all()
        return not self._is_stopped

    def _unpin(self) -> None:
        with self._changed:
            pinned, self._pinned = self._pinned, []
        for each in pinned:
            each.release()
