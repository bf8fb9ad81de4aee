"""Index: a tenant's published blocks by key, their chains, the eviction order, and the reasons of misses.

A chain links blocks that were saved one after the other; its end is evicted before its beginning, which is more useful.
Blocks at their home and copies of other nodes' blocks are linked separately: copies come and go, and a block at its
home is useful without the copies before it.
"""

from collections import OrderedDict

from ems.wire.messages import Cause
from kvloom.pool.storage.entries import Entry, Written
from kvloom.pool.storage.evict import Classes, Order
from kvloom.pool.storage.memory import TenantMemory

_MAX_REMEMBERED = 65536  # keys whose loss can be explained


class Index:
    """Guarded by the lock of its pool."""

    def __init__(self, memory: TenantMemory, orders: Classes) -> None:
        """memory: is notified of uses."""
        self.entries: dict[bytes, Entry] = {}
        self.orders = orders
        self.rcache_bytes = 0
        self._memory = memory
        self._lost: OrderedDict[bytes, Cause] = OrderedDict()
        self._hint: tuple[bytes, Entry] | None = None
        self.get = self.entries.get

    def touch(self, entry: Entry) -> None:
        """The block was used."""
        entry.queue.touch(entry.key)
        self._memory.touch(entry)

    def add(self, written: Written) -> Entry:
        """Add a block whose key is not in the index; pinned once."""
        (key, offset, length, slot, is_rcache), checksum, parent = written
        before = self.entries.get(parent)
        if before is not None and before.is_rcache != is_rcache:
            before = None
        queue = self.orders.of(slot, is_rcache)
        entry = Entry(key, offset, length, slot, checksum, is_rcache, before, queue, pins=1)
        if before is not None:
            before.children[entry] = None
        self.entries[key] = entry
        queue.add(key)
        self._memory.add(entry)
        self.rcache_bytes += slot if is_rcache else 0
        self._lost.pop(key, None)
        return entry

    def forget(self, entry: Entry, cause: Cause) -> None:
        """Remove a block. The caller owns its memory if no reader pins it, otherwise its last reader does."""
        del self.entries[entry.key]
        entry.queue.remove(entry.key)
        self._memory.discard(entry)
        if entry.parent is not None:
            entry.parent.children.pop(entry, None)
            entry.parent = None
        if entry.children:
            for child in entry.children:
                child.parent = None
            entry.children = {}
        entry.is_live = False
        self.rcache_bytes -= entry.slot if entry.is_rcache else 0
        self.remember(entry.key, cause)

    def remember(self, key: bytes, cause: Cause) -> None:
        """Record why a key is not in the index."""
        self._lost[key] = cause
        if len(self._lost) > _MAX_REMEMBERED:
            self._lost.popitem(last=False)

    def missed(self, key: bytes, count: int) -> Cause:
        """A reader did not find the key, nor `count` - 1 more behind it. Returns why; COLD when it was never there, as
        far as is known.
        """
        self.orders.missed(key, count)
        return self._lost.get(key, Cause.COLD)

    def evict(self, orders: list[Order], wanted: int) -> list[Entry]:
        """Remove the least useful block of the first order that has one, after the blocks of its chain from the end.

        Stops at `wanted` bytes. The caller owns the memory of the returned blocks.
        """
        key = next((key for order in orders if (key := order.victim(self._is_pinned)) is not None), None)
        if key is None:
            return []
        gone: list[Entry] = []
        leaf: Entry | None = self._leaf(self.entries[key])
        while leaf is not None and wanted > 0:
            above = leaf.parent if leaf.key != key else None
            self.forget(leaf, Cause.EVICTED)
            gone.append(leaf)
            wanted -= leaf.slot
            self._hint = (key, above) if above is not None else None
            leaf = above if above is not None and not above.pins and not above.children else None
        return gone

    def _is_pinned(self, key: bytes) -> bool:
        return self.entries[key].pins > 0

    def _leaf(self, entry: Entry) -> Entry:
        """The end of an unpinned chain below `entry`: a prefix is worth more than what follows it."""
        if self._hint is not None and self._hint[0] == entry.key and self._hint[1].is_live and not self._hint[1].pins:
            entry = self._hint[1]
        while entry.children:
            child = next((child for child in entry.children if not child.pins), None)
            if child is None:
                break
            entry = child
        return entry

    def check(self) -> None:
        """Assert the invariants: orders list the same blocks; chains are linked in both directions, and within their
        kind.
        """
        self.orders.check()
        assert sum(map(len, self.orders.every())) == len(self.entries)
        for key, entry in self.entries.items():
            assert (entry.is_live, entry.key, entry.pins >= 0) == (True, key, True), "a dead block in the index"
            assert key in entry.queue
            parent = entry.parent
            assert parent is None or (entry in parent.children and parent.is_live)
            assert parent is None or parent.is_rcache == entry.is_rcache
        assert sum(entry.slot for entry in self.entries.values() if entry.is_rcache) == self.rcache_bytes
