"""Node: what the sessions of one agent share: pools, keyring, counters, and the other nodes, if any."""

import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol

import msgspec

from ems.keys import DEFAULT_TENANT, derive
from ems.runs import Bytes
from ems.wire.messages import Cause
from kvloom.pool.auth import Credential, Keyring, RefusedLogins
from kvloom.pool.config import AgentConfig, TenantLimits
from kvloom.pool.staging import Staging
from kvloom.pool.storage.budget import Budget, RateLimit
from kvloom.pool.storage.counts import Counts
from kvloom.pool.storage.entries import Block
from kvloom.pool.storage.opening import PoolOptions, open_pool
from kvloom.pool.storage.passing import Held
from kvloom.pool.storage.pool import Pool

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # identifies this machine until it reboots
_POOL_ID_BYTES = 8


class Route(IntEnum):
    """The home of a new block."""

    HERE = 0  # this node is its home
    AWAY = 1
    CUT_OFF = 2  # its home is unreachable for now: the block stays here, where other nodes do not find it


class Outgoing(NamedTuple):
    """A block to be sent to another node or a store. data: its bytes; parent: the key before it in its chain, or
    empty.
    """

    key: bytes
    data: Bytes
    checksum: bytes
    parent: bytes


class Fetched(NamedTuple):
    """Blocks that were fetched into the pool, pinned. problem: why some could not be asked for, NONE = all were.
    block_bytes: of the largest block.
    """

    problem: Cause
    held: list[Held]
    block_bytes: int = 0

    def release(self) -> None:
        """Ends the pins."""
        for held in self.held:
            held.release()


Came = Callable[[int], bool]  # called with the bytes of arrived blocks; returns whether the rest is still wanted


class Others(Protocol):
    """The rest of the cluster as a session sees it. Implementations never raise for errors of other machines."""

    def route(self, key: bytes) -> Route:
        """The home of a new block with this key."""
        ...

    def fetch(
        self, pool: Pool, keys: list[bytes], deadline_s: float, has_end: bool = False, came: Came | None = None
    ) -> Fetched:
        """Fetch those blocks that other nodes have into the pool, pinned, so that arriving blocks do not evict each
        other.

        has_end: blocks behind a key that no node has are useless. came: called, on any thread, when some have arrived.
        """
        ...

    def has(self, tenant: str, keys: list[bytes], deadline_s: float) -> list[bool]:
        """Which of `keys` other nodes have; a node that does not answer in time has none."""
        ...

    def push_later(self, pool: Pool, entry: Block, parent: bytes, deadline_s: float) -> bool:
        """Send a block to its home in the background. False when too many blocks wait for that until the deadline.

        Takes over one pin.
        """
        ...

    def push_now(self, tenant: str, block: Outgoing, deadline_s: float) -> bool:
        """Send a block to its home. False when it did not arrive in time."""
        ...


class Node:
    """May be called from any thread."""

    def __init__(self, config: AgentConfig) -> None:
        self.config = config
        self.incarnation = secrets.token_bytes(16)
        self.keyring = Keyring(config.is_open, config.secret)
        self.counts = Counts()
        self.refused = RefusedLogins("a login")
        self.others: Others | None = None
        self.staging = Staging(config.max_staging_bytes)
        self._budget = Budget(config.pool_bytes)
        self._options = PoolOptions(self._budget, config.geometry, config.rcache_share, config.eviction)
        self._pools: dict[str, Pool] = {}
        self._put_limits: dict[str, RateLimit] = {}
        self._lock = threading.Lock()
        for limits in config.tenants:
            if self.set_limits(limits):
                raise ValueError(f"--tenant: the guarantee of {limits.tenant} does not fit into the pool")

    def set_limits(self, *limits: TenantLimits) -> list[TenantLimits]:
        """Set guarantees and quotas at once: tenants above theirs give memory back.

        Returns those that cannot be kept, and were not set. Shrinking guarantees make room for growing ones.
        """
        with self._lock:
            growing = sorted(limits, key=lambda each: each.guarantee > self._budget.guarantee(each.tenant))
            refused = [e for e in growing if not self._budget.set_limits(e.tenant, e.guarantee, e.quota)]
            excess = self._budget.excess()
            pools = dict(self._pools)
        for tenant, size in excess.items():
            pools[tenant].shrink(size)
        return refused

    def replace_credentials(self, credentials: Iterable[Credential]) -> None:
        """Only these are valid from now on. Memory of tenants without credentials is freed."""
        valid = list(credentials)
        self.keyring.replace(valid)
        tenants = {each.tenant for each in valid}
        for pool in self.pools():
            if pool.tenant not in tenants and not self.config.is_open:
                pool.shrink(self.config.pool_bytes)

    def pool(self, tenant: str) -> Pool:
        """The tenant's pool, created at first use. A tenant without limits may use what is not guaranteed to others."""
        config = self.config
        with self._lock:
            if tenant not in self._pools:
                if not self._budget.knows(tenant):
                    self._budget.set_limits(tenant, 0, config.pool_bytes)
                self._pools[tenant] = open_pool(tenant, self._options)
            return self._pools[tenant]

    def evict(self, tenant: str, size: int) -> None:
        """Evict bytes of a tenant's blocks, if it has a pool here."""
        with self._lock:
            pool = self._pools.get(tenant)
        if pool is not None:
            pool.evict(size)

    def put_limit(self, tenant: str) -> RateLimit | None:
        """The rate at which the tenant may save on this node; None = unlimited."""
        if not self.config.put_rate:
            return None
        with self._lock:
            return self._put_limits.setdefault(tenant, RateLimit(self.config.put_rate))

    def pools(self) -> list[Pool]:
        with self._lock:
            return list(self._pools.values())

    def key_salt(self, tenant: str) -> bytes:
        """The tenant's secret salt of all keys: the same on all nodes of a cluster."""
        return derive(self.config.secret, "tenant salt", tenant)

    def pool_id(self, tenant: str) -> bytes:
        """Identifies the blocks that the tenant's engines find here: equal on all nodes that share them, and after a
        restart.

        A single node is identified by machine and socket.
        """
        config = self.config
        shared = config.engine or ("peers" if config.peers or config.control_url else "")
        where = shared or f"{_BOOT_ID.read_text().strip()} {config.socket.absolute()}"
        return derive(config.secret, f"pool {where}", tenant)[:_POOL_ID_BYTES]

    def prepare(self) -> None:
        """Create the default tenant's first segment and its pages, so that the first save is as fast as the next."""
        if self.config.is_open:
            self.pool(DEFAULT_TENANT).warm()

    def close(self) -> None:
        for pool in self.pools():
            pool.close()


class PoolStats(msgspec.Struct):
    """Figures of one tenant on one node."""

    tenant: str
    usage: dict[str, int]
    counts: dict[str, int]


class NodeStats(msgspec.Struct):
    """Figures of one node."""

    node_id: str
    pools: list[PoolStats]
    counts: dict[str, int]
    peers: dict[str, bool] = {}
    gauges: dict[str, int] = {}


def collect(
    node: Node,
    peers: dict[str, bool],
    gauges: Mapping[str, int] = MappingProxyType({}),
    more: Mapping[str, int] = MappingProxyType({}),
) -> NodeStats:
    """The node's figures now. gauges: as `metrics` names them; more: counters besides the node's own."""
    pools = [PoolStats(pool.tenant, pool.usage(), dict(pool.counts)) for pool in node.pools()]
    return NodeStats(node.config.node_id, pools, {**node.counts, **more}, peers, dict(gauges))
