"""Node: what the sessions of one agent share: pools, keyring, counters, and the way to other nodes if there is one."""

import secrets
import threading
from collections import Counter
from typing import Protocol

from ems.keys import DEFAULT_TENANT, derive
from kvloom.pool.auth import Keyring
from kvloom.pool.budget import Budget, RateLimit
from kvloom.pool.config import AgentConfig, TenantLimits
from kvloom.pool.entries import Entry
from kvloom.pool.evict import ORDERS
from kvloom.pool.store import TenantPool


class Others(Protocol):
    """The rest of the cluster as a session sees it. Implementations never raise for what happens on other machines."""

    def is_local(self, key: bytes) -> bool:
        """Whether this node is the key's home."""
        ...

    def fetch(self, pool: TenantPool, keys: list[bytes], deadline_s: float) -> tuple[str, list[Entry]]:
        """Brings those blocks that other nodes have into the pool.

        Returns "" or why some could not be asked for, and the blocks, pinned: one that comes must not push out another.
        """
        ...

    def count(self, tenant: str, keys: list[bytes], deadline_s: float) -> int:
        """Length of the prefix of `keys` that other nodes have."""
        ...

    def push_later(self, pool: TenantPool, entry: Entry, parent: bytes) -> None:
        """Sends a block to its home in the background. Takes over one pin."""
        ...

    def push_now(self, tenant: str, key: bytes, parent: bytes, data: bytes, checksum: bytes, deadline_s: float) -> bool:
        """Sends a block to its home; False when it did not arrive in time."""
        ...


class Node:
    """Any thread may call."""

    def __init__(self, config: AgentConfig) -> None:
        self.config = config
        self.incarnation = secrets.token_bytes(16)
        self.keyring = Keyring(config.is_open, config.secret)
        self.counts: Counter[str] = Counter()
        self.others: Others | None = None
        self.is_draining = False
        self._budget = Budget(config.pool_bytes)
        self._pools: dict[str, TenantPool] = {}
        self._put_limits: dict[str, RateLimit] = {}
        self._lock = threading.Lock()
        for limits in config.tenants:
            if not self.set_limits(limits):
                raise ValueError(f"tenants: the guarantee of {limits.tenant} does not fit into the pool")

    def set_limits(self, limits: TenantLimits) -> bool:
        """Sets a tenant's guarantee and quota; False when they cannot be kept."""
        with self._lock:
            return self._budget.set_limits(limits.tenant, limits.guarantee, limits.quota)

    def pool(self, tenant: str) -> TenantPool:
        """The tenant's pool, made at its first use. A tenant without limits may use what nobody is guaranteed."""
        config = self.config
        with self._lock:
            if tenant not in self._pools:
                if not self._budget.knows(tenant):
                    self._budget.set_limits(tenant, 0, config.pool_bytes)
                order = ORDERS[config.eviction]
                is_sealed = not config.is_direct
                pool = TenantPool(tenant, self._budget, config.geometry, is_sealed, config.rcache_share, order)
                self._pools[tenant] = pool
            return self._pools[tenant]

    def put_limit(self, tenant: str) -> RateLimit | None:
        """How fast the tenant may save on this node; None = as fast as it can."""
        if not self.config.put_rate:
            return None
        with self._lock:
            return self._put_limits.setdefault(tenant, RateLimit(self.config.put_rate))

    def pools(self) -> list[TenantPool]:
        with self._lock:
            return list(self._pools.values())

    def key_salt(self, tenant: str) -> bytes:
        """The tenant's secret part of every key: the same on all nodes of a cluster."""
        return derive(self.config.secret, "tenant salt", tenant)

    def prepare(self) -> None:
        """Makes the default tenant's first segment and its pages, so that the first save is as fast as the next."""
        if self.config.is_open:
            self.pool(DEFAULT_TENANT).warm()

    def close(self) -> None:
        for pool in self.pools():
            pool.close()
