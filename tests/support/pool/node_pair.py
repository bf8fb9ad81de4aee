"""Two nodes in this process: one reads the other's blocks, whose expected bytes are known, through a proxy."""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import numpy as np
import xxhash

from ems.keys import KEY_BYTES
from ems.wire.messages import Cause
from kvloom.pool.agent import Agent
from kvloom.pool.cluster.placement import home
from kvloom.pool.config import Address
from kvloom.pool.storage.entries import Reservation, Written
from kvloom.pool.storage.pool import Pool
from tests.support.pool.agents import SECRET, blocks_of, running_agent
from tests.support.pool.node_proxy import NodeProxy

SIZE = 5000
NUM_KEYS = 150  # more than two parts of a fetch


def data_of(key: bytes, size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(list(key)).integers(0, 256, size, np.uint8)


def keep(pool: Pool, key: bytes, size: int = SIZE) -> None:
    begun = pool.begin(key, size)
    assert isinstance(begun, Reservation)
    pool.view(begun.offset, size)[:] = data_of(key, size)
    pool.unpin([pool.publish(Written(begun, xxhash.xxh3_128_digest(data_of(key, size)))).entry])


def keys_of(node: str, count: int = NUM_KEYS) -> list[bytes]:
    """Keys whose home is that node of a and b."""
    draw, found = random.Random(count), list[bytes]()
    while len(found) < count:
        key = draw.randbytes(KEY_BYTES)
        if home(key, ("a", "b")) == node:
            found.append(key)
    return found


class Pair(NamedTuple):
    """Node a, which reaches b through a proxy."""

    a: Agent
    b: Agent
    proxy: NodeProxy

    @property
    def here(self) -> Pool:
        return self.a.node.pool("default")

    @property
    def there(self) -> Pool:
        return self.b.node.pool("default")

    def fetch(self, keys: list[bytes], deadline_s: float, has_end: bool = True) -> tuple[Cause, list[bytes]]:
        """The error, and the keys that were fetched; checks that each has the expected bytes and was pinned until
        now.
        """
        problem, held, _block_bytes = self.a.peers.fetch(self.here, keys, deadline_s, has_end)
        entries = [entry for each in held for entry in each.blocks()]
        for entry in entries:
            assert (self.here.view(entry.offset, entry.length) == data_of(entry.key, entry.length)).all()
            assert entry.is_home
            assert entry.is_rcache
        self.here.unpin(entries)
        assert [block.pins for block in blocks_of(self.here)] == [0] * len(blocks_of(self.here))
        self.here.check()
        return problem, [entry.key for entry in entries]

    def rest(self) -> int:
        """Bytes in use that belong to no block of node a."""
        return self.here.usage()["used_bytes"] - sum(block.slot for block in blocks_of(self.here))


@contextmanager
def nodes(a_tls=None, b_tls=None, **changes: object) -> Iterator[Pair]:
    cluster = {"listen": ("127.0.0.1", 0), "secret": SECRET, "peers": (Address("x", "127.0.0.1", 1),), **changes}
    with ExitStack() as stack:
        a = stack.enter_context(running_agent(node_id="a", tls=a_tls, **cluster))
        b = stack.enter_context(running_agent(node_id="b", tls=b_tls, **cluster))
        proxy = NodeProxy(b.peer_port)
        stack.callback(proxy.close)
        a.peers.set_members([Address("b", "127.0.0.1", proxy.port)])
        b.peers.set_members([Address("a", "127.0.0.1", a.peer_port)])
        yield Pair(a, b, proxy)
