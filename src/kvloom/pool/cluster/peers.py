"""Peers: the other nodes of the cluster, as sessions use them; configured, or as the control plane says."""

import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ems.wire.messages import Cause
from kvloom.pool.cluster.fetching import Fetch, Wanted
from kvloom.pool.cluster.peer_line import Own
from kvloom.pool.cluster.peer_link import PeerLink
from kvloom.pool.cluster.placement import home
from kvloom.pool.config import Address
from kvloom.pool.node import Came, Fetched, Outgoing, Route
from kvloom.pool.storage.entries import Block
from kvloom.pool.storage.pool import Pool

if TYPE_CHECKING:
    from kvloom.pool.cluster.tls_channel import NodeTls

_FETCH_THREADS = 8
TLS_LINES = 2  # one core decrypts less than a network brings


class Peers:
    """Implements `kvloom.pool.node.Others`. May be called from any thread."""

    def __init__(
        self,
        own_id: str,
        secret: bytes,
        tls: "NodeTls | None" = None,
        num_lines: int = 0,
        max_block_bytes: int = 0,
    ) -> None:
        """tls: files, None = not encrypted. num_lines: connections for loads from a node, 0 = by `tls`.
        max_block_bytes: what this node accepts; peers that accept less are logged.
        """
        self._own_id = own_id
        self._own = Own(own_id, secret, tls, num_lines or (TLS_LINES if tls is not None else 1), max_block_bytes)
        self._lock = threading.Lock()
        self._links: dict[str, PeerLink] = {}
        self._active: tuple[str, ...] = (own_id,)
        self._all: tuple[str, ...] = (own_id,)
        self._executor = ThreadPoolExecutor(_FETCH_THREADS, thread_name_prefix="ems-fetch")

    def set_members(self, others: Iterable[Address], draining: frozenset[str] = frozenset()) -> None:
        """Replace the other nodes. Draining nodes (this one may be among them) are read from, not written to."""
        addresses = {address.id: address for address in others if address.id != self._own_id}
        with self._lock:
            for gone in [i for i, link in self._links.items() if addresses.get(i) != link.address]:
                self._links.pop(gone).close()
            for node_id, address in addresses.items():
                if node_id not in self._links:
                    self._links[node_id] = PeerLink(self._own, address)
            self._all = (self._own_id, *addresses)
            self._active = tuple(i for i in self._all if i not in draining) or (self._own_id,)

    def _link(self, key: bytes, node_ids: tuple[str, ...]) -> PeerLink | None:
        node_id = home(key, node_ids)
        return self._links.get(node_id)

    def route(self, key: bytes) -> Route:
        """The home of a new block with this key."""
        with self._lock:
            link = self._link(key, self._active)
        if link is None:
            return Route.HERE
        return Route.CUT_OFF if link.breaker.is_open(time.monotonic()) else Route.AWAY

    def _by_link(self, keys: list[bytes]) -> dict[PeerLink, list[bytes]]:
        """The nodes to ask for each key: its home, and its home before nodes began to drain."""
        groups: dict[PeerLink, list[bytes]] = {}
        with self._lock:
            for key in keys:
                links = {self._link(key, self._active)}
                if len(self._all) > len(self._active):
                    links.add(self._link(key, self._all))
                for link in links:
                    if link is not None:
                        groups.setdefault(link, []).append(key)
        return groups

    def fetch(
        self, pool: Pool, keys: list[bytes], deadline_s: float, has_end: bool = False, came: Came | None = None
    ) -> Fetched:
        """Fetch those blocks that other nodes have into the pool, from all nodes at once; they are pinned."""
        wanted = Wanted(keys, has_end, came)
        tasks, fetches = [], []
        for link, part in self._by_link(keys).items():
            wanted.expect(part)
            fetches.append(fetch := Fetch(pool, part, wanted))
            tasks += [(link, fetch, line) for line in range(link.num_lines(fetch))]
        if not tasks:
            return Fetched(Cause.NONE, [])
        calls = [self._executor.submit(link.get, fetch, line, deadline_s) for link, fetch, line in tasks[1:]]
        link, fetch, line = tasks[0]  # on this thread, which would only wait
        problems = [link.get(fetch, line, deadline_s), *(call.result() for call in calls)]
        problem = next((each for each in problems if each), Cause.NONE)
        block_bytes = max(fetch.block_bytes for fetch in fetches)
        return Fetched(problem, [held for fetch in fetches for held in fetch.held], block_bytes)

    def has(self, tenant: str, keys: list[bytes], deadline_s: float) -> list[bool]:
        """Which of `keys` other nodes have; a node that does not answer in time has none."""
        asked = list(self._by_link(keys).items())
        if not asked:
            return [False] * len(keys)
        calls = [self._executor.submit(link.has, tenant, part, deadline_s) for link, part in asked[1:]]
        link, part = asked[0]  # on this thread, which would only wait
        answers = [link.has(tenant, part, deadline_s), *(call.result() for call in calls)]
        found = set()
        for (_link, part), answer in zip(asked, answers, strict=True):
            found |= {key for key, has in zip(part, answer, strict=True) if has}
        return [key in found for key in keys]

    def push_later(self, pool: Pool, entry: Block, parent: bytes, deadline_s: float) -> bool:
        """Send a block to its home in the background. False when too many blocks wait for that until the deadline.

        Takes over one pin.
        """
        with self._lock:
            link = self._link(entry.key, self._active)
        if link is None:  # its home since the members changed
            pool.unpin([entry])
            return True
        return link.push_later(pool, entry, parent, deadline_s)

    def push_now(self, tenant: str, block: Outgoing, deadline_s: float) -> bool:
        """Send a block to its home. False when it did not arrive in time."""
        with self._lock:
            link = self._link(block.key, self._active)
        return link is not None and link.put(tenant, [block], deadline_s) == [True]

    def status(self) -> dict[str, bool]:
        """For each other node whether it is reachable at present."""
        now_s = time.monotonic()
        with self._lock:
            return {node_id: not link.breaker.is_open(now_s) for node_id, link in self._links.items()}

    def end_revoked(self) -> int:
        """End connections to nodes whose certificate has been revoked. Returns how many."""
        with self._lock:
            links = list(self._links.values())
        return sum(link.end_revoked() for link in links)

    def close(self) -> None:
        self.set_members(())
        self._executor.shutdown(wait=False, cancel_futures=True)
