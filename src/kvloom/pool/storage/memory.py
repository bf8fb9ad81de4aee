"""TenantMemory: the memory of one tenant on one node, and how useful each part of it is.

Segments are shared with clients, so they go back to the node as a whole; slabs belong to size classes. Usefulness
decays with the bytes saved since a block was last used: a class that is not used any more loses its slabs to others
within about as many bytes of saves as the tenant has memory.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from ems.runs import Bytes
from kvloom.pool.storage.allocator import SlabAllocator
from kvloom.pool.storage.budget import Budget
from kvloom.pool.storage.entries import Entry, Geometry
from kvloom.pool.storage.segments import SharedMemory, take_slab

_MARGIN = 15 / 16  # a class takes another one's slab when that is worth less than this fraction of its own memory


@dataclass(slots=True)
class _Use:
    """Use of a slab or a class: bytes of its blocks, and the sum of bytes * time of last use."""

    bytes: int = 0
    stamps: int = 0

    def add(self, size: int, used_at: int) -> None:
        self.bytes += size
        self.stamps += size * used_at

    def worth(self, now: int, capacity: int) -> float:
        """Its bytes, weighted by age: half after `capacity` bytes of saves."""
        if not self.bytes:
            return 0.0
        age = now - self.stamps / self.bytes
        return self.bytes * capacity / (capacity + age)


@dataclass(slots=True)
class _Shelf:
    """The published blocks of one slab."""

    entries: dict[Entry, None] = field(default_factory=dict)  # in order of arrival
    use: _Use = field(default_factory=_Use)


class TenantMemory:
    """Guarded by the lock of its tenant's pool, except `view`."""

    def __init__(self, tenant: str, budget: Budget, geometry: Geometry) -> None:
        self._tenant = tenant
        self._budget = budget
        self._geometry = geometry
        self._slabs_a_segment = geometry.segment_bytes // geometry.slab_bytes
        self._allocator = SlabAllocator(geometry.slab_bytes)
        self._segments: list[SharedMemory | None] = []  # None = given back; its number is never reused
        self._leaving: set[int] = set()  # segments that are given back once all their slots are freed
        self._spoiled: Counter[int] = Counter()  # damaged slots of each segment
        self._shelves: list[_Shelf] = []
        self._of_class: defaultdict[int, _Use] = defaultdict(_Use)
        self._clock = 0  # bytes saved so far
        self.num_given_back = 0  # segments given back so far

    @property
    def used_bytes(self) -> int:
        return self._allocator.used_bytes

    @property
    def capacity(self) -> int:
        return self._allocator.capacity

    def view(self, offset: int, length: int) -> Bytes:
        """The bytes of reserved memory or of a pinned block."""
        number, inner = divmod(offset, self._geometry.segment_bytes)
        segment = self._segments[number]
        assert segment is not None, "nothing is handed out of it"
        return segment.data[inner : inner + length]

    def segment_fd(self, number: int) -> int | None:
        """Descriptor of a segment; None when there is none of that number."""
        segment = self._segments[number] if 0 <= number < len(self._segments) else None
        return segment.fd if segment is not None else None

    # Slots

    def allocate(self, slot: int, count: int) -> list[int]:
        """Offsets of up to `count` slots that are free; none = no room."""
        return self._allocator.allocate(slot, count)

    def free(self, offset: int) -> None:
        """Free a slot, and give its segment back if it is the last slot of one that leaves."""
        self._allocator.free(offset)
        if self._leaving:
            self._let_go(offset // self._geometry.segment_bytes)

    def spoil(self, offset: int) -> None:
        """Never hand the slot out again."""
        number = offset // self._geometry.segment_bytes
        self._spoiled[number] += 1
        self._let_go(number)

    def room(self, slot: int) -> int:
        """Bytes that blocks of a class could take without anything being freed."""
        return self._allocator.room(slot)

    def is_leaving(self, offset: int) -> bool:
        """Whether the slot is in a segment that is being given back."""
        return self._allocator.is_closed(self._allocator.slab_of(offset))

    # Use

    def add(self, entry: Entry) -> None:
        """A block was published."""
        self._clock += entry.slot
        entry.used_at = self._clock
        shelf = self._shelves[self._allocator.slab_of(entry.offset)]
        shelf.entries[entry] = None
        shelf.use.add(entry.slot, self._clock)
        self._of_class[entry.slot].add(entry.slot, self._clock)

    def touch(self, entry: Entry) -> None:
        """A block was used."""
        passed = (self._clock - entry.used_at) * entry.slot
        if passed:
            entry.used_at = self._clock
            self._shelves[self._allocator.slab_of(entry.offset)].use.stamps += passed
            self._of_class[entry.slot].stamps += passed

    def discard(self, entry: Entry) -> None:
        """A block lost its key."""
        shelf = self._shelves[self._allocator.slab_of(entry.offset)]
        shelf.entries.pop(entry, None)
        shelf.use.add(-entry.slot, entry.used_at)
        self._of_class[entry.slot].add(-entry.slot, entry.used_at)

    # Slabs

    def grow(self) -> bool:
        """Take more memory from the node: complete the last slab, or add one. Raises OSError when it has none."""
        missing = self._allocator.num_missing
        size = self._budget.take(self._tenant, missing or self._geometry.slab_bytes)
        if not size:
            return False
        try:
            is_first = not missing and self._allocator.num_slabs == len(self._segments) * self._slabs_a_segment
            take_slab(self._segments, is_first, size, self._geometry, self._budget.headroom)
        except BaseException:
            self._budget.give_back(self._tenant, size)
            raise
        if not missing:
            self._shelves.append(_Shelf())
        self._allocator.grow(size)
        return True

    def prefault(self) -> bool:
        """Make the kernel provide the pages of the last slab; False when it cannot. Call without the lock."""
        segment = self._segments[-1]
        index = (self._allocator.num_slabs - 1) % self._slabs_a_segment
        return segment is not None and segment.prefault(index * self._geometry.slab_bytes, self._geometry.slab_bytes)

    def wants_slab(self, slot: int) -> bool:
        """Whether a class should take a slab of another class, rather than evict its own blocks."""
        return bool(self._lesser(slot))

    def slab_to_clear(self, slot: int, is_forced: bool = False) -> list[Entry]:
        """The blocks of the slab that a class should take from another one; empty when it should evict its own.

        is_forced: it has no evictable block. A slab in which blocks are read or written is no candidate.
        """
        lesser = self._lesser(slot)
        if not lesser and not is_forced:
            return []
        found, least = None, 0.0
        for index, shelf in enumerate(self._shelves):
            of = self._allocator.slot(index)
            if of in (0, slot) or (of not in lesser and not is_forced) or self._allocator.is_closed(index):
                continue
            worth = shelf.use.worth(self._clock, self.capacity)
            is_whole = len(shelf.entries) == self._allocator.count(index) and self._allocator.size(index) >= slot
            if (found is None or worth < least) and is_whole and not any(entry.pins for entry in shelf.entries):
                found, least = shelf, worth
        return list(found.entries) if found is not None else []

    def _lesser(self, slot: int) -> set[int]:
        """The classes whose memory is clearly less useful than this one's."""
        worth = {
            each: use.worth(self._clock, self.capacity) / memory
            for each, use in self._of_class.items()
            if (memory := self._allocator.class_bytes(each))
        }
        limit = worth[slot] * _MARGIN if slot in worth else float("inf")
        return {each for each, value in worth.items() if value < limit and each != slot}

    # Giving back

    def coldest_segment(self, is_idle: bool = False) -> int | None:
        """The segment whose blocks are least useful; is_idle: only those without readers and writers. None when none
        can be given back.
        """
        worth = {
            number: sum(self._shelves[index].use.worth(self._clock, self.capacity) for index in self._slabs_of(number))
            for number, segment in enumerate(self._segments)
            if segment is not None and number not in self._leaving and (not is_idle or self._is_idle(number))
        }
        return min(worth, key=worth.__getitem__, default=None)

    def _is_idle(self, segment: int) -> bool:
        blocks = self.blocks_of(segment)
        num_used = sum(map(self._allocator.count, self._slabs_of(segment))) - self._spoiled[segment]
        return len(blocks) == num_used and not any(entry.pins for entry in blocks)

    def _slabs_of(self, segment: int) -> range:
        start = segment * self._slabs_a_segment
        return range(start, min(start + self._slabs_a_segment, self._allocator.num_slabs))

    def blocks_of(self, segment: int) -> list[Entry]:
        """The published blocks of a segment."""
        return [entry for index in self._slabs_of(segment) for entry in self._shelves[index].entries]

    def give_back(self, segment: int) -> int:
        """Take a segment out of use; the system gets it when it has no readers and writers any more.

        Its blocks must have lost their keys. Returns its bytes, which are free for others at once.
        """
        while self._allocator.num_slabs < (segment + 1) * self._slabs_a_segment:  # slabs that were never used
            self._allocator.skip()
            self._shelves.append(_Shelf())
        size = sum(map(self._allocator.close, self._slabs_of(segment)))
        self._budget.give_back(self._tenant, size)
        self._leaving.add(segment)
        self._let_go(segment)
        return size

    def _let_go(self, number: int) -> None:
        segment = self._segments[number]
        num_used = sum(map(self._allocator.count, self._slabs_of(number))) - self._spoiled[number]
        if number in self._leaving and segment is not None and num_used == 0:
            self._leaving.discard(number)
            self._segments[number] = None
            self.num_given_back += 1
            segment.close()

    def close(self) -> None:
        """Closes the segments' descriptors; mappings of clients stay valid until they unmap."""
        for segment in self._segments:
            if segment is not None:
                segment.close()

    def check(self, entries: list[Entry]) -> None:
        """States the invariants: shelves and sums of use are those of `entries`, the published blocks."""
        self._allocator.check()
        uses = [_Use() for _ in self._shelves]
        for entry in entries:
            index = self._allocator.slab_of(entry.offset)
            assert entry in self._shelves[index].entries
            assert not self._allocator.is_closed(index)
            uses[index].add(entry.slot, entry.used_at)
        assert uses == [shelf.use for shelf in self._shelves]
        assert sum(use.bytes for use in self._of_class.values()) == sum(entry.slot for entry in entries)
        assert sum(use.stamps for use in self._of_class.values()) == sum(e.slot * e.used_at for e in entries)
        assert len(self._shelves) == self._allocator.num_slabs
