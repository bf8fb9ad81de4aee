"""Budget: how a node's memory is shared between tenants.

A tenant's guarantee is set aside for it and never lent. What is left is given out segment by segment to whoever comes
first, up to each tenant's quota. A tenant that finds nothing left evicts its own blocks, never another's: so nobody
can push out, or learn about, what others keep.
"""

import threading
from dataclasses import dataclass


@dataclass(slots=True)
class _Share:
    guarantee: int
    quota: int
    used: int = 0


class Budget:
    """Bytes of a node, handed out in segments that are never taken back. Any thread may call."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._shares: dict[str, _Share] = {}
        self._lock = threading.Lock()

    def set_limits(self, tenant: str, guarantee: int, quota: int) -> bool:
        """Sets or changes a tenant's limits, bytes; False, and no change, when its guarantee cannot be kept."""
        with self._lock:
            others = sum(self._reserved(share) for name, share in self._shares.items() if name != tenant)
            share = self._shares.get(tenant, _Share(0, 0))
            if guarantee > quota or others + max(guarantee, share.used) > self.total_bytes:
                return False
            self._shares[tenant] = _Share(guarantee, quota, share.used)
            return True

    def knows(self, tenant: str) -> bool:
        return tenant in self._shares

    def quota(self, tenant: str) -> int:
        return self._shares[tenant].quota

    def take(self, tenant: str, size: int) -> bool:
        """Books `size` bytes for a tenant when its quota (rounded up to `size`) and the node allow it."""
        with self._lock:
            share = self._shares[tenant]
            if share.used >= share.quota:
                return False
            free = self.total_bytes - sum(self._reserved(each) for each in self._shares.values())
            if share.used + size - self._reserved(share) > free:
                return False
            share.used += size
            return True

    @staticmethod
    def _reserved(share: _Share) -> int:
        return max(share.guarantee, share.used)

    def check(self) -> None:
        """States the invariant: what is guaranteed and what is in use fit into the node."""
        assert sum(self._reserved(share) for share in self._shares.values()) <= self.total_bytes


class RateLimit:
    """Bytes a second on average, one second's worth at once. Any thread may call; times in seconds of one clock."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._level = float(bytes_per_s)
        self._at_s = 0.0
        self._lock = threading.Lock()

    def take(self, size: int, now_s: float) -> bool:
        """Whether `size` bytes may go now. The last ones that fit may overdraw, so that no size waits for ever."""
        with self._lock:
            self._level = min(self._bytes_per_s, self._level + max(0.0, now_s - self._at_s) * self._bytes_per_s)
            self._at_s = now_s
            if self._level <= 0:
                return False
            self._level -= size
            return True
