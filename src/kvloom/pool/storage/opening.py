"""Opens a tenant's pool: in C++ where there is a compiler or a wheel that brought the library, else in Python."""

import logging
from typing import NamedTuple

from ems.native.library import is_to_be_compiled
from kvloom.pool.storage.budget import Budget
from kvloom.pool.storage.entries import Geometry
from kvloom.pool.storage.evict import ORDERS
from kvloom.pool.storage.native.library import INDEX, functions
from kvloom.pool.storage.native.pool import NativePool
from kvloom.pool.storage.pool import Pool
from kvloom.pool.storage.store import TenantPool

log = logging.getLogger(__name__)


class PoolOptions(NamedTuple):
    """What all pools of a node share. rcache_share: of a quota, for copies, 0..1; eviction: a name of `ORDERS`."""

    budget: Budget
    geometry: Geometry
    rcache_share: float
    eviction: str


def prepare() -> None:
    """Load the library before a call needs it: the first time on a machine it is compiled, which is logged."""
    if is_to_be_compiled(INDEX):
        log.info("compiling %s, once on this machine", INDEX.name)
    functions()


def open_pool(tenant: str, options: PoolOptions) -> Pool:
    """The first one on a machine without the library compiles it, which takes some seconds."""
    budget, geometry, rcache_share, eviction = options
    native = functions()
    if native is None:
        return TenantPool(tenant, budget, geometry, rcache_share, ORDERS[eviction])
    return NativePool(tenant, budget, geometry, rcache_share, (native, eviction == "lru"))
