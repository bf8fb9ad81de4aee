"""Budget: how a node's memory is shared between tenants.

A tenant's guarantee is reserved for it and never lent. The rest goes to whoever asks first, up to each tenant's quota.
A tenant that finds nothing left evicts its own blocks, never another's, so no tenant can evict, or learn about, the
blocks of others. When limits change, `excess` says which tenants must give memory back.
"""

import ctypes
import threading
from dataclasses import dataclass
from enum import StrEnum

from kvloom.pool.storage.headroom import POOL_SHARE, Headroom

PAGE_BYTES = 4096  # memory is given out in whole pages


class Refusal(StrEnum):
    """Why there was no room for a block."""

    QUOTA = "quota"  # it is larger than the tenant's quota
    NODE_FULL = "node_full"  # other tenants hold the memory, and nothing is guaranteed to this one
    PINNED = "pinned"  # all evictable blocks are being read or written
    NO_MEMORY = "no_memory"  # the system gave no memory
    TOO_LARGE = "too_large"  # larger than --slab
    RATE = "rate"  # the tenant exceeds its rate


def _whole_pages(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


@dataclass(slots=True)
class _Share:
    guarantee: int
    quota: int
    used: int = 0

    @property
    def reserved(self) -> int:
        return max(self.guarantee, self.used)


class Budget:
    """Bytes of a node. May be called from any thread."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.headroom = Headroom(POOL_SHARE)
        self._shares: dict[str, _Share] = {}
        self._lock = threading.Lock()
        self.version = ctypes.c_uint64()  # incremented when limits change or memory becomes free; C++ reads it

    def set_limits(self, tenant: str, guarantee: int, quota: int) -> bool:
        """Set a tenant's limits in bytes. False, and no change, when the node cannot keep all guarantees.

        Others may hold more than they are entitled to then: see `excess`.
        """
        with self._lock:
            others = sum(share.guarantee for name, share in self._shares.items() if name != tenant)
            if guarantee > quota or others + guarantee > self.total_bytes:
                return False
            share = self._shares.setdefault(tenant, _Share(guarantee, quota))
            share.guarantee, share.quota = guarantee, quota
            self.version.value += 1
            return True

    def knows(self, tenant: str) -> bool:
        return tenant in self._shares

    def guarantee(self, tenant: str) -> int:
        """0 for a tenant without limits."""
        return self._shares[tenant].guarantee if tenant in self._shares else 0

    def quota(self, tenant: str) -> int:
        return self._shares[tenant].quota

    def take(self, tenant: str, size: int) -> int:
        """Reserve up to `size` bytes for a tenant, in whole pages, within its quota and the node's memory. Returns how
        many; 0 = none.
        """
        with self._lock:
            share = self._shares[tenant]
            taken = max(0, min(size, self._left(share))) // PAGE_BYTES * PAGE_BYTES
            share.used += taken
            return taken

    def has_room(self, tenant: str) -> bool:
        """Whether `take` would return anything."""
        with self._lock:
            return self._left(self._shares[tenant]) >= PAGE_BYTES

    def _left(self, share: _Share) -> int:
        free = max(0, self.total_bytes - sum(each.reserved for each in self._shares.values()))
        return min(share.quota, free + share.reserved) - share.used

    def give_back(self, tenant: str, size: int) -> None:
        """Ends the booking of `size` bytes."""
        with self._lock:
            self._shares[tenant].used -= size
            self.version.value += 1

    def excess(self) -> dict[str, int]:
        """Bytes that each tenant must give back, so that all quotas are kept and all guarantees can be used.

        Missing guarantees are taken from all tenants above theirs, in proportion to the excess, in whole pages: a part
        of a page is of no use to anybody.
        """
        with self._lock:
            over = {name: _whole_pages(max(0, share.used - share.quota)) for name, share in self._shares.items()}
            kept = {name: share.used - over[name] for name, share in self._shares.items()}
            beyond = {name: max(0, kept[name] - share.guarantee) for name, share in self._shares.items()}
            lacking = sum(max(share.guarantee, kept[name]) for name, share in self._shares.items()) - self.total_bytes
            if lacking > 0:
                total = sum(beyond.values())
                for name, size in beyond.items():
                    over[name] += min(size, _whole_pages(-(-lacking * size // total)))
            return {name: size for name, size in over.items() if size}

    def why_refused(self, tenant: str, size: int) -> Refusal:
        """Why a tenant cannot have `size` more bytes, which `take` refused."""
        share = self._shares[tenant]
        return Refusal.QUOTA if share.used + size > share.quota else Refusal.NODE_FULL

    def check(self) -> None:
        """Assert the invariant: guarantees and memory in use fit into the node, unless `excess` says otherwise."""
        assert sum(share.guarantee for share in self._shares.values()) <= self.total_bytes
        over = self.excess()
        assert sum(max(s.guarantee, s.used - over.get(n, 0)) for n, s in self._shares.items()) <= self.total_bytes


class RateLimit:
    """A token bucket: bytes a second on average, bursts of one second's worth. Any thread; times in seconds of one
    clock.
    """

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._level = float(bytes_per_s)
        self._at_s = 0.0
        self._lock = threading.Lock()

    def take(self, size: int, now_s: float) -> bool:
        """Whether `size` bytes may pass now. The last ones may overdraw, so that no size waits for ever."""
        with self._lock:
            self._level = min(self._bytes_per_s, self._level + max(0.0, now_s - self._at_s) * self._bytes_per_s)
            self._at_s = now_s
            if self._level <= 0:
                return False
            self._level -= size
            return True
