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
from kvloom.pool.evict import Classes, Order, S3Fifo
from kvloom.pool.segments import Bytes, SharedMemory

_MAX_REMEMBERED = 65536  # keys whose loss can still be explained
_MAX_EVICTIONS = 4096  # to make room for one block
_AHEAD_SHARE = 1 / 16  # of a quota that is kept free at most, for the next batch
_AHEAD_BLOCKS = 8  # evicted at a time: a request that comes meanwhile waits for that long


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
        self._orders = Classes(new_order)
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
        return self.begin_all([key], [length], [is_rcache])[0]

    def begin_all(self, keys: list[bytes], lengths: list[int], is_rcache: list[bool]) -> list[Place | Entry | Status]:
        """As `begin` for each in order; ends after the first that has no place."""
        found: list[Place | Entry | Status] = []
        is_alike = len(set(lengths)) == 1 and not any(is_rcache)
        free: list[int] = []  # places that were emptied together, for the keys to come
        with self._lock:
            num_new = sum(key not in self._index for key in keys) if is_alike else 1
            for key, length, is_copy in zip(keys, lengths, is_rcache, strict=True):
                entry = self._index.get(key)
                if entry is not None:
                    entry.pins += 1
                    found.append(entry)
                    continue
                slot = slot_bytes(length)
                if slot > self.geometry.slab_bytes:
                    found.append(Status.TOO_LARGE)
                    break
                if not free:
                    free = self._make_room(slot, is_copy, max(1, num_new) * slot)[::-1]
                if not free:
                    self.counts["no_room"] += 1
                    self._remember(key, Cause.QUOTA)
                    found.append(Status.NO_ROOM)
                    break
                found.append(Place(key, free.pop(), length, slot, is_copy))
                num_new -= 1
            for offset in free:
                self._allocator.free(offset)
        return found

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
        queue = self._orders.of(slot, is_rcache)
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
            while (left := size - (start - self._allocator.used_bytes)) > 0 and (
                gone := self._evict(self._orders.every(), left)
            ):
                for entry in gone:
                    self._allocator.free(entry.offset)
            return start - self._allocator.used_bytes

    # Room

    def make_room_ahead(self, slot: int, count: int) -> bool:
        """Evicts some of what a batch of `count` blocks would evict, before it comes. Whether more is to go.

        At most a small share of the quota is kept free.
        """
        with self._lock:
            quota = self._budget.quota(self.tenant)
            size = min(count, int(quota * _AHEAD_SHARE) // slot) * slot
            limit = min(quota, self._allocator.capacity)
            excess = self._allocator.used_bytes + size - limit
            if not size or excess <= 0:
                return False
            if limit < quota and self._grow():
                return True
            gone = self._evict(self._orders.every(), min(excess, _AHEAD_BLOCKS * slot))
            for entry in gone:
                self._allocator.free(entry.offset)
            return bool(gone)

    def _make_room(self, slot: int, is_rcache: bool, wanted: int) -> list[int]:
        """Offsets of places of that size, one at least, within the tenant's limits; none when only pinned blocks are in
        the way. wanted: bytes that are worth emptying at once."""
        quota = self._budget.quota(self.tenant)
        for _ in range(_MAX_EVICTIONS):
            if is_rcache and self._rcache_bytes + slot > quota * self._rcache_share:
                gone = self._evict(self._orders.copies(), wanted)
            elif self._allocator.used_bytes + slot > quota:
                gone = self._evict(self._orders.every(), wanted)
            else:
                count = max(1, min(wanted, quota - self._allocator.used_bytes) // slot)
                offsets = self._allocator.allocate(slot, 1 if is_rcache else count)
                if offsets:
                    return offsets
                if self._grow():
                    continue
                gone = self._evict(self._orders.of_slot(slot), wanted)
                if not gone:
                    if not self._clear_slab(slot):
                        return []
                    continue
            if not gone:
                return []
            is_within = not is_rcache or self._rcache_bytes + slot <= quota * self._rcache_share
            is_within = is_within and self._allocator.used_bytes <= quota
            fitting = [entry.offset for entry in gone if entry.slot == slot] if is_within else []
            for entry in gone:
                if not is_within or entry.slot != slot:
                    self._allocator.free(entry.offset)
            if fitting:
                return fitting
        return []

    def _grow(self) -> bool:
        if not self._budget.take(self.tenant, self.geometry.segment_bytes):
            return False
        size = self.geometry.segment_bytes
        self._segments.append(SharedMemory("ems-pool", size, self._is_sealed, self.geometry.has_huge_pages))
        self._allocator.grow(self.geometry.segment_bytes // self.geometry.slab_bytes)
        return True

    def _evict(self, orders: list[Order], wanted: int) -> list[Entry]:
        """Forgets the least useful block of the first order that has one, and its chain's blocks from the end to it.

        Stops at `wanted` bytes. The places of what it returns are the caller's, to use or to free.
        """
        key = next((key for order in orders if (key := order.victim(self._is_pinned)) is not None), None)
        if key is None:
            return []
        gone: list[Entry] = []
        leaf: Entry | None = self._leaf(self._index[key])
        while leaf is not None and wanted > 0:
            above = leaf.parent if leaf.key != key else None
            self._forget(leaf, Cause.EVICTED)
            gone.append(leaf)
            wanted -= leaf.slot
            self._hint = (key, above) if above is not None else None
            leaf = above if above is not None and not above.pins and not above.children else None
        self.counts["evicted"] += len(gone)
        return gone

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
            self._orders.check()
            assert sum(map(len, self._orders.every())) == len(self._index)
            assert sum(len(entries) for entries in self._slabs.values()) == len(self._index)
            for key, entry in self._index.items():
                assert (entry.is_live, entry.key, entry.pins >= 0) == (True, key, True), "a dead block in the index"
                assert key in entry.queue
                assert entry.parent is None or (entry in entry.parent.children and entry.parent.is_live)
            cached = sum(entry.slot for entry in self._index.values() if entry.is_rcache)
            assert cached == self._rcache_bytes
