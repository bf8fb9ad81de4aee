"""TenantPool: the blocks of one tenant on one node: index, memory, pins, eviction.

A block is written in two steps: `begin` gives a place that nobody else sees, `publish` makes it readable; a writer
that dies in between leaves nothing behind. A read pins its blocks, and a pinned block keeps its bytes whatever happens
to its key. One lock a tenant guards the index; bytes are copied outside of it.
"""

import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

import xxhash

from ems.wire.messages import Cause, Status
from kvloom.pool.allocator import SlabAllocator, slot_bytes
from kvloom.pool.budget import Budget
from kvloom.pool.evict import S3Fifo
from kvloom.pool.segments import Bytes, SharedMemory

_MAX_REMEMBERED = 65536  # keys whose loss can still be explained
_MAX_EVICTIONS = 4096  # to make room for one block


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes in bytes: a segment is one shared file, a multiple of a slab; a block fits into a slab."""

    segment_bytes: int
    slab_bytes: int


@dataclass(slots=True, eq=False)
class Entry:
    """A published block. `children` were saved right after it in a chain; they are useless without it."""

    key: bytes
    offset: int
    length: int
    checksum: bytes
    is_rcache: bool
    parent: "Entry | None"
    queue: S3Fifo
    children: "dict[Entry, None]" = field(default_factory=dict)
    pins: int = 0
    is_live: bool = True


@dataclass(frozen=True, slots=True)
class Place:
    """Memory for a block that is being written; it ends in `publish` or `abandon`."""

    key: bytes
    offset: int
    length: int
    is_rcache: bool


class TenantPool:
    """All methods may be called from any thread."""

    def __init__(self, tenant: str, budget: Budget, geometry: Geometry, is_sealed: bool, rcache_share: float) -> None:
        """`budget` is the node's. rcache_share: of the quota, for copies of other nodes' blocks, 0..1."""
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
        self._queues: dict[tuple[bool, int], S3Fifo] = {}
        self._slabs: dict[int, set[Entry]] = {}
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
            entry = self._index.get(key)
            if entry is not None:
                entry.pins += 1
                return entry
            if slot_bytes(length) > self.geometry.slab_bytes:
                return Status.TOO_LARGE
            offset = self._make_room(length, is_rcache)
            if offset is None:
                self.counts["no_room"] += 1
                return Status.NO_ROOM
            return Place(key, offset, length, is_rcache)

    def publish(self, place: Place, checksum: bytes, parent: bytes = b"") -> tuple[Status, Entry]:
        """Makes a written place readable and returns its block, pinned; someone else's, if they were faster."""
        with self._lock:
            entry = self._index.get(place.key)
            if entry is not None:
                self._allocator.free(place.offset)
                entry.pins += 1
                same = entry.length == place.length and entry.checksum == checksum
                return (Status.DUPLICATE if same else Status.CONFLICT), entry
            before = self._index.get(parent)
            queue = self._queue(place)
            entry = Entry(place.key, place.offset, place.length, checksum, place.is_rcache, before, queue, pins=1)
            if before is not None:
                before.children[entry] = None
            self._index[place.key] = entry
            queue.add(place.key)
            self._slabs.setdefault(self._allocator.slab_of(place.offset), set()).add(entry)
            self._rcache_bytes += slot_bytes(place.length) if place.is_rcache else 0
            self._lost.pop(place.key, None)
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
                self._forget(entry, Cause.CORRUPT)
                entry.pins += 1  # for ever: the memory stays out of use
        return True

    def evict(self, size: int) -> int:
        """Drops blocks, least useful first, until `size` bytes are free or only pinned ones are left. Bytes freed."""
        with self._lock:
            start = self._allocator.used_bytes
            while start - self._allocator.used_bytes < size and self._evict_any(None):
                pass
            return start - self._allocator.used_bytes

    # Room

    def _make_room(self, length: int, is_rcache: bool) -> int | None:
        slot = slot_bytes(length)
        quota = self._budget.quota(self.tenant)
        for _ in range(_MAX_EVICTIONS):
            if is_rcache and self._rcache_bytes + slot > quota * self._rcache_share:
                if not self._evict_any(True):
                    return None
            elif self._allocator.used_bytes + slot > quota:
                if not self._evict_any(None):
                    return None
            else:
                offset = self._allocator.allocate(length)
                if offset is not None:
                    return offset
                if not (self._grow() or self._evict_class(slot) or self._clear_slab(slot)):
                    return None
        return None

    def _grow(self) -> bool:
        if not self._budget.take(self.tenant, self.geometry.segment_bytes):
            return False
        self._segments.append(SharedMemory("ems-pool", self.geometry.segment_bytes, self._is_sealed))
        self._allocator.grow(self.geometry.segment_bytes // self.geometry.slab_bytes)
        return True

    def _evict_class(self, slot: int) -> bool:
        return any(self._evict_from(self._queues.get((is_rcache, slot))) for is_rcache in (True, False))

    def _evict_any(self, is_rcache: bool | None) -> bool:
        """From the class that takes the most memory, copies of other nodes' blocks first; None = of either kind."""
        kinds = (True, False) if is_rcache is None else (is_rcache,)
        for kind in kinds:
            queues = [(len(queue) * slot, queue) for (k, slot), queue in self._queues.items() if k == kind]
            if len(queues) > 1:
                queues.sort(key=lambda pair: -pair[0])
            for _size, queue in queues:
                if self._evict_from(queue):
                    return True
        return False

    def _evict_from(self, queue: S3Fifo | None) -> bool:
        key = queue.victim(lambda key: self._index[key].pins > 0) if queue else None
        if key is None:
            return False
        leaf = self._leaf(self._index[key])
        self._hint = (key, leaf.parent) if leaf.parent is not None and leaf.key != key else None
        self._forget(leaf, Cause.EVICTED)
        self.counts["evicted"] += 1
        return True

    def _leaf(self, entry: Entry) -> Entry:
        """The end of an unpinned chain below `entry`: a prefix is worth more than what follows it."""
        if self._hint is not None and self._hint[0] == entry.key and self._hint[1].is_live and not self._hint[1].pins:
            entry = self._hint[1]
        while True:
            child = next((child for child in entry.children if not child.pins), None)
            if child is None:
                return entry
            entry = child

    def _clear_slab(self, slot: int) -> bool:
        """Empties the least used slab of another class, so that this class can have it."""
        for index in self._allocator.slabs_by_use(other_than=slot):
            entries = self._slabs.get(index, set())
            if len(entries) == self._allocator.count(index) and not any(entry.pins for entry in entries):
                for entry in list(entries):
                    self._forget(entry, Cause.EVICTED)
                    self.counts["evicted"] += 1
                return True
        return False

    def _forget(self, entry: Entry, cause: Cause) -> None:
        """Takes a block out of the index; its memory is free once no reader pins it."""
        del self._index[entry.key]
        entry.queue.remove(entry.key)
        self._slabs[self._allocator.slab_of(entry.offset)].discard(entry)
        if entry.parent is not None:
            entry.parent.children.pop(entry, None)
        for child in entry.children:
            child.parent = None
        entry.children = {}
        entry.is_live = False
        self._rcache_bytes -= slot_bytes(entry.length) if entry.is_rcache else 0
        self._lost[entry.key] = cause
        if len(self._lost) > _MAX_REMEMBERED:
            self._lost.popitem(last=False)
        if entry.pins == 0:
            self._allocator.free(entry.offset)

    def _queue(self, place: Place) -> S3Fifo:
        kind = (place.is_rcache, slot_bytes(place.length))
        queue = self._queues.get(kind)
        if queue is None:
            queue = self._queues[kind] = S3Fifo()
        return queue

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
            for queue in self._queues.values():
                queue.check()
            assert sum(len(queue) for queue in self._queues.values()) == len(self._index)
            assert sum(len(entries) for entries in self._slabs.values()) == len(self._index)
            for key, entry in self._index.items():
                assert (entry.is_live, entry.key, entry.pins >= 0) == (True, key, True), "a dead block in the index"
                assert key in entry.queue
                assert entry.parent is None or (entry in entry.parent.children and entry.parent.is_live)
            cached = sum(slot_bytes(entry.length) for entry in self._index.values() if entry.is_rcache)
            assert cached == self._rcache_bytes
