"""TenantPool: the blocks of one tenant on one node: index, memory, pins, eviction.

A block is written in two steps: `begin` gives a place that nobody else sees, `publish` makes it readable; a writer
that dies in between leaves nothing behind. A read pins its blocks, and a pinned block keeps its bytes whatever happens
to its key. One lock a tenant guards the index; bytes are copied outside of it.
"""

import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable

import xxhash

from ems.wire.messages import Cause, Status
from kvloom.pool.allocator import SlabAllocator, slot_bytes
from kvloom.pool.budget import Budget
from kvloom.pool.entries import Entry, Geometry, Place
from kvloom.pool.evict import Order, S3Fifo
from kvloom.pool.segments import Bytes, SharedMemory

_MAX_REMEMBERED = 65536  # keys whose loss can still be explained
_MAX_EVICTIONS = 4096  # to make room for one block


class TenantPool:
    """All methods may be called from any thread."""

    def __init__(
        self,
        tenant: str,
        budget: Budget,
        geometry: Geometry,
        is_sealed: bool,
        rcache_share: float,
        new_order: Callable[[], Order] = S3Fifo,
    ) -> None:
        """`budget` is the node's. rcache_share: of the quota, for copies of other nodes' blocks, 0..1.

        new_order: who goes first among the blocks of a size class.
        """
        self.tenant = tenant
        self.geometry = geometry
        self.counts: Counter[str] = Counter()
        self._budget = budget
        self._is_sealed = is_sealed
        self._rcache_share = rcache_share
        self._lock = threading.Lock()
        self._allocator = SlabAllocator(geometry.slab_bytes)
        self._segments: list[SharedMemory] = []
        self._index: dict[bytes, Entry] = {}
        self._new_order = new_order
        self._queues: dict[bool, dict[int, Order]] = {True: {}, False: {}}  # is_rcache -> slot -> order
        self._slabs: defaultdict[int, set[Entry]] = defaultdict(set)
        self._rcache_bytes = 0
        self._lost: OrderedDict[bytes, Cause] = OrderedDict()
        self._hint: tuple[bytes, Entry] | None = None

    # Reading

    def pin_prefix(self, keys: list[bytes]) -> list[Entry]:
        """The blocks of the longest prefix of `keys` that is here, each pinned until `unpin`."""
        found = []
        with self._lock:
            for key in keys:
                entry = self._index.get(key)
                if entry is None:
                    break
                entry.pins += 1
                entry.queue.touch(key)
                found.append(entry)
        return found

    def pin_each(self, keys: list[bytes]) -> list[Entry | None]:
        """Each block that is here, pinned; None for the others."""
        with self._lock:
            entries = [self._index.get(key) for key in keys]
            for entry in entries:
                if entry is not None:
                    entry.pins += 1
                    entry.queue.touch(entry.key)
            return entries

    def pin_again(self, entry: Entry) -> None:
        """One more pin for a block that is pinned."""
        with self._lock:
            entry.pins += 1

    def count_prefix(self, keys: list[bytes]) -> int:
        """Length of the longest prefix of `keys` that is here; does not count as a use."""
        with self._lock:
            return next((i for i, key in enumerate(keys) if key not in self._index), len(keys))

    def unpin(self, entries: list[Entry]) -> None:
        """Ends pins; the memory of blocks that lost their key meanwhile is free from here on."""
        with self._lock:
            for entry in entries:
                entry.pins -= 1
                if entry.pins == 0 and not entry.is_live:
                    self._allocator.free(entry.offset)

    def missing(self, keys: list[bytes]) -> list[bytes]:
        """Those keys that are not here, in order."""
        with self._lock:
            return [key for key in keys if key not in self._index]

    def why_missing(self, key: bytes) -> Cause:
        """COLD when it was never here, as far as remembered."""
        with self._lock:
            return self._lost.get(key, Cause.COLD)

    def view(self, offset: int, length: int) -> Bytes:
        """The bytes of a place or of a pinned block."""
        segment, inner = divmod(offset, self.geometry.segment_bytes)
        return self._segments[segment].data[inner : inner + length]

    def locate(self, offset: int) -> tuple[int, int]:
        """Segment number and offset within it."""
        return divmod(offset, self.geometry.segment_bytes)

    def segment_fd(self, segment: int) -> int | None:
        """Descriptor of a segment for a client of this tenant."""
        return self._segments[segment].fd if 0 <= segment < len(self._segments) else None

    # Writing

    def begin(self, key: bytes, length: int, is_rcache: bool = False) -> Place | Entry | Status:
        """A place for a block; or the block of that key, pinned; or why there is none (NO_ROOM, TOO_LARGE)."""
        with self._lock:
            return self._begin(key, length, is_rcache)

    def begin_all(self, keys: list[bytes], lengths: list[int], is_rcache: list[bool]) -> list[Place | Entry | Status]:
        """As `begin` for each in order; ends after the first that has no place."""
        found: list[Place | Entry | Status] = []
        with self._lock:
            for key, length, is_copy in zip(keys, lengths, is_rcache, strict=True):
                found.append(self._begin(key, length, is_copy))
                if isinstance(found[-1], Status):
                    break
        return found

    def _begin(self, key: bytes, length: int, is_rcache: bool) -> Place | Entry | Status:
        entry = self._index.get(key)
        if entry is not None:
            entry.pins += 1
            return entry
        slot = slot_bytes(length)
        if slot > self.geometry.slab_bytes:
            return Status.TOO_LARGE
        offset = self._make_room(slot, is_rcache)
        if offset is None:
            self.counts["no_room"] += 1
            self._remember(key, Cause.QUOTA)
            return Status.NO_ROOM
        return Place(key, offset, length, slot, is_rcache)

    def publish(self, place: Place, checksum: bytes, parent: bytes = b"") -> tuple[Status, Entry]:
        """Makes a written place readable and returns its block, pinned; someone else's, if they were faster."""
        with self._lock:
            return self._publish(place, checksum, parent)

    def publish_all(self, written: list[tuple[Place, bytes, bytes]]) -> list[tuple[Status, Entry]]:
        """As `publish` for each (place, checksum, parent) in order."""
        with self._lock:
            return [self._publish(place, checksum, parent) for place, checksum, parent in written]

    def _publish(self, place: Place, checksum: bytes, parent: bytes) -> tuple[Status, Entry]:
        key, offset, length, slot, is_rcache = place
        entry = self._index.get(key)
        if entry is not None:
            self._allocator.free(offset)
            entry.pins += 1
            same = entry.length == length and entry.checksum == checksum
            return (Status.DUPLICATE if same else Status.CONFLICT), entry
        before = self._index.get(parent)
        queue = self._queues[is_rcache].get(slot)
        if queue is None:
            queue = self._queues[is_rcache][slot] = self._new_order()
        entry = Entry(key, offset, length, slot, checksum, is_rcache, before, queue, pins=1)
        if before is not None:
            before.children[entry] = None
        self._index[key] = entry
        queue.add(key)
        self._slabs[self._allocator.slab_of(offset)].add(entry)
        self._rcache_bytes += slot if is_rcache else 0
        self._lost.pop(key, None)
        return Status.STORED, entry

    def abandon(self, place: Place) -> None:
        """Gives a place back unwritten."""
        with self._lock:
            self._allocator.free(place.offset)

    def distrust(self, entry: Entry) -> bool:
        """Checks a pinned block's bytes; when they changed, forgets it and never uses its memory again."""
        if xxhash.xxh3_128_digest(self.view(entry.offset, entry.length).data) == entry.checksum:
            return False
        with self._lock:
            if entry.is_live:
                self.counts["corrupt"] += 1
                self._forget(entry, Cause.CORRUPT)  # its memory is not given back: it stays out of use for ever
                entry.pins += 1
        return True

    def evict(self, size: int) -> int:
        """Drops blocks, least useful first, until `size` bytes are free or only pinned ones are left. Bytes freed."""
        with self._lock:
            start = self._allocator.used_bytes
            while start - self._allocator.used_bytes < size and (entry := self._evict_any(is_rcache=None)):
                self._allocator.free(entry.offset)
            return start - self._allocator.used_bytes

    # Room

    def _make_room(self, slot: int, is_rcache: bool) -> int | None:
        """Offset of a place of that size within the tenant's limits; None when only pinned blocks are in the way."""
        quota = self._budget.quota(self.tenant)
        for _ in range(_MAX_EVICTIONS):
            if is_rcache and self._rcache_bytes + slot > quota * self._rcache_share:
                entry = self._evict_any(is_rcache=True)
            elif self._allocator.used_bytes + slot > quota:
                entry = self._evict_any(is_rcache=None)
            else:
                offset = self._allocator.allocate(slot)
                if offset is not None:
                    return offset
                if self._grow():
                    continue
                entry = self._evict_from(self._queues[True].get(slot)) or self._evict_from(
                    self._queues[False].get(slot)
                )
                if entry is None:
                    if not self._clear_slab(slot):
                        return None
                    continue
            if entry is None:
                return None
            is_within = not is_rcache or self._rcache_bytes + slot <= quota * self._rcache_share
            if entry.slot == slot and is_within and self._allocator.used_bytes <= quota:
                return entry.offset
            self._allocator.free(entry.offset)
        return None

    def _grow(self) -> bool:
        if not self._budget.take(self.tenant, self.geometry.segment_bytes):
            return False
        size = self.geometry.segment_bytes
        self._segments.append(SharedMemory("ems-pool", size, self._is_sealed, self.geometry.has_huge_pages))
        self._allocator.grow(self.geometry.segment_bytes // self.geometry.slab_bytes)
        return True

    def _evict_any(self, is_rcache: bool | None) -> Entry | None:
        """From the class that takes the most memory, copies of other nodes' blocks first; None = of either kind."""
        for kind in (True, False) if is_rcache is None else (is_rcache,):
            queues = self._queues[kind]
            order = queues if len(queues) < 2 else sorted(queues, key=lambda slot: -slot * len(queues[slot]))
            for slot in order:
                entry = self._evict_from(queues[slot])
                if entry is not None:
                    return entry
        return None

    def _evict_from(self, queue: Order | None) -> Entry | None:
        """Forgets the least useful block of a class and returns it; its place is the caller's, to use or to free."""
        key = queue.victim(self._is_pinned) if queue is not None else None
        if key is None:
            return None
        leaf = self._leaf(self._index[key])
        self._hint = (key, leaf.parent) if leaf.parent is not None and leaf.key != key else None
        self._forget(leaf, Cause.EVICTED)
        self.counts["evicted"] += 1
        return leaf

    def _is_pinned(self, key: bytes) -> bool:
        return self._index[key].pins > 0

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

    def _clear_slab(self, slot: int) -> bool:
        """Empties the least used slab of another class, so that this class can have it."""
        for index in self._allocator.slabs_by_use(other_than=slot):
            entries = self._slabs.get(index, set())
            if len(entries) == self._allocator.count(index) and not any(entry.pins for entry in entries):
                for entry in list(entries):
                    self._forget(entry, Cause.EVICTED)
                    self._allocator.free(entry.offset)
                    self.counts["evicted"] += 1
                return True
        return False

    def _forget(self, entry: Entry, cause: Cause) -> None:
        """Takes a block out of the index. Its memory is the caller's when no reader pins it, else `unpin` frees it."""
        del self._index[entry.key]
        entry.queue.remove(entry.key)
        self._slabs[self._allocator.slab_of(entry.offset)].discard(entry)
        if entry.parent is not None:
            entry.parent.children.pop(entry, None)
        if entry.children:
            for child in entry.children:
                child.parent = None
            entry.children = {}
        entry.is_live = False
        self._rcache_bytes -= entry.slot if entry.is_rcache else 0
        self._remember(entry.key, cause)

    def _remember(self, key: bytes, cause: Cause) -> None:
        self._lost[key] = cause
        if len(self._lost) > _MAX_REMEMBERED:
            self._lost.popitem(last=False)

    # Knowing

    def warm(self) -> None:
        """Makes all segments the quota allows and has the kernel provide their pages now; for a thread of its own."""
        while True:
            with self._lock:
                if not self._grow():
                    return
                segment = self._segments[-1]
            if not segment.prefault(0, segment.size):
                return

    def block_keys(self) -> list[bytes]:
        """The keys of all blocks, oldest first: a prefix before what follows it."""
        with self._lock:
            return list(self._index)

    def usage(self) -> dict[str, int]:
        """Blocks, bytes in use, bytes of segments, bytes of read cache, quota."""
        with self._lock:
            return {
                "blocks": len(self._index),
                "used_bytes": self._allocator.used_bytes,
                "capacity_bytes": self._allocator.capacity,
                "rcache_bytes": self._rcache_bytes,
                "quota_bytes": self._budget.quota(self.tenant),
            }

    def close(self) -> None:
        """Closes the segments' descriptors; mappings of clients stay valid until they unmap."""
        with self._lock:
            for segment in self._segments:
                segment.close()

    def check(self) -> None:
        """States the invariants: index, queues and slabs list the same blocks; chains are linked both ways."""
        with self._lock:
            self._allocator.check()
            self._budget.check()
            queues = [queue for kind in self._queues.values() for queue in kind.values()]
            for queue in queues:
                queue.check()
            assert sum(map(len, queues)) == len(self._index)
            assert sum(len(entries) for entries in self._slabs.values()) == len(self._index)
            for key, entry in self._index.items():
                assert (entry.is_live, entry.key, entry.pins >= 0) == (True, key, True), "a dead block in the index"
                assert key in entry.queue
                assert entry.parent is None or (entry in entry.parent.children and entry.parent.is_live)
            cached = sum(entry.slot for entry in self._index.values() if entry.is_rcache)
            assert cached == self._rcache_bytes
