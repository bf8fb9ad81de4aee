"""SlabAllocator: which byte range of a tenant's pool a block gets. Pure.

The pool is a row of slabs of equal size, of which the last may be short. A slab serves slots of one size class at a
time; when its last slot is freed it can serve another class. Both calls are O(1), and the waste is at most the rounding
of a class (12.5 %) plus the end of a slab.
"""

from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache

MIN_SLOT_BYTES = 4096


@lru_cache(maxsize=4096)
def slot_bytes(length: int) -> int:
    """The size class of a block: the next of eight steps a doubling, 4 KiB at least."""
    if length <= MIN_SLOT_BYTES:
        return MIN_SLOT_BYTES
    step = max(512, 1 << max(0, (length - 1).bit_length() - 4))
    return -(-length // step) * step


@dataclass(slots=True)
class _Slab:
    size: int  # bytes in use for slots, at most those of a slab
    slot: int = 0  # size class, 0 = free
    used: int = 0  # slots handed out
    free: set[int] = field(default_factory=set)  # slot indices given back
    next: int = 0  # slots from here on were never handed out
    is_closed: bool = False  # closed: no more slots are handed out

    @property
    def room(self) -> int:
        """Slots that could be handed out."""
        return len(self.free) + self.size // self.slot - self.next if self.slot else 0


class SlabAllocator:
    """Offsets into a row of slabs. `grow` adds memory at its end, `close` takes slabs out of use for ever."""

    def __init__(self, slab_bytes: int) -> None:
        self.slab_bytes = slab_bytes
        self._slabs: list[_Slab] = []
        self._free_slabs: list[int] = []
        self._open: dict[int, list[int]] = {}  # class -> slabs with a free slot (may be stale; checked on use)
        self._room: Counter[int] = Counter()  # class -> free slots in its slabs
        self._class_bytes: Counter[int] = Counter()  # class -> bytes of its slabs
        self.used_bytes = 0  # of handed-out slots, except those in closed slabs
        self.capacity = 0  # bytes of slabs that are not closed

    @property
    def num_slabs(self) -> int:
        """Closed ones included: the next slab's number."""
        return len(self._slabs)

    @property
    def num_missing(self) -> int:
        """Bytes that the last slab lacks to its full size; 0 when it is complete or closed."""
        last = self._slabs[-1] if self._slabs else None
        return 0 if last is None or last.is_closed else self.slab_bytes - last.size

    def grow(self, size: int) -> None:
        """Add `size` bytes: to an incomplete last slab, `num_missing` at most, or as a new slab."""
        if self.num_missing:
            slab = self._slabs[-1]
            before = slab.room
            slab.size += size
            if slab.slot:
                self._class_bytes[slab.slot] += size
                self._room[slab.slot] += slab.room - before
                if slab.room and not before:
                    self._open[slab.slot].append(len(self._slabs) - 1)
        else:
            self._slabs.append(_Slab(size))
            self._free_slabs.append(len(self._slabs) - 1)
        self.capacity += size

    def skip(self) -> None:
        """Add a closed slab, so that numbers of later slabs move on."""
        self._slabs.append(_Slab(0, is_closed=True))

    def allocate(self, slot: int, count: int = 1) -> list[int]:
        """Offsets of up to `count` free slots of that class, all from one slab; empty = no room."""
        index = self._slab_for(slot) if slot <= self.slab_bytes else None
        if index is None:
            return []
        slab = self._slabs[index]
        positions = [slab.free.pop() for _ in range(min(count, len(slab.free)))]
        fresh = min(count - len(positions), slab.size // slot - slab.next)
        positions += range(slab.next, slab.next + fresh)
        slab.next += fresh
        slab.used += len(positions)
        self._room[slot] -= len(positions)
        self.used_bytes += slot * len(positions)
        start = index * self.slab_bytes
        return [start + position * slot for position in positions]

    def _slab_for(self, slot: int) -> int | None:
        open_slabs = self._open.setdefault(slot, [])
        while open_slabs:
            slab = self._slabs[open_slabs[-1]]
            if slab.slot == slot and slab.room and not slab.is_closed:
                return open_slabs[-1]
            open_slabs.pop()
        index = next((i for i in reversed(self._free_slabs) if self._slabs[i].size >= slot), None)
        if index is None:
            return None
        self._free_slabs.remove(index)
        slab = self._slabs[index]
        slab.slot = slot
        self._class_bytes[slot] += slab.size
        self._room[slot] += slab.room
        open_slabs.append(index)
        return index

    def free(self, offset: int) -> None:
        """Free the slot at `offset`, which `allocate` returned and which was not freed since."""
        index, inner = divmod(offset, self.slab_bytes)
        slab = self._slabs[index]
        position = inner // max(1, slab.slot)
        is_slot = slab.slot and inner % slab.slot == 0 and position < slab.next and position not in slab.free
        assert is_slot, "not a slot in use"
        slab.used -= 1
        slab.free.add(position)
        if slab.is_closed:
            return
        self.used_bytes -= slab.slot
        self._room[slab.slot] += 1
        if slab.used == 0:
            self._room[slab.slot] -= slab.room
            self._class_bytes[slab.slot] -= slab.size
            self._slabs[index] = _Slab(slab.size)
            self._free_slabs.append(index)
        elif slab.room == 1:
            self._open[slab.slot].append(index)

    def close(self, slab: int) -> int:
        """Take a slab out of use for ever; its slots stay valid until freed. Returns its bytes."""
        closed = self._slabs[slab]
        if closed.is_closed:
            return 0
        closed.is_closed = True
        if closed.slot:
            self._room[closed.slot] -= closed.room
            self._class_bytes[closed.slot] -= closed.size
        else:
            self._free_slabs.remove(slab)
        self.used_bytes -= closed.used * closed.slot
        self.capacity -= closed.size
        return closed.size

    def slab_of(self, offset: int) -> int:
        return offset // self.slab_bytes

    def is_closed(self, slab: int) -> bool:
        return self._slabs[slab].is_closed

    def slot(self, slab: int) -> int:
        """The size class that a slab serves; 0 = none."""
        return self._slabs[slab].slot

    def count(self, slab: int) -> int:
        """Slots of a slab that are handed out."""
        return self._slabs[slab].used

    def size(self, slab: int) -> int:
        """Bytes of a slab."""
        return self._slabs[slab].size

    def class_bytes(self, slot: int) -> int:
        """Bytes of all slabs of a class."""
        return self._class_bytes[slot]

    def room(self, slot: int) -> int:
        """Bytes of free slots that blocks of a class could use now."""
        free = len(self._free_slabs) * (self.slab_bytes // slot)
        if self.num_missing and not self._slabs[-1].slot:
            free += self._slabs[-1].size // slot - self.slab_bytes // slot
        return (self._room[slot] + free) * slot

    def check(self) -> None:
        """Assert the invariants: counts agree, free lists hold no slot twice, a free slab has no class."""
        assert len(set(self._free_slabs)) == len(self._free_slabs)
        room: Counter[int] = Counter()
        total = 0
        for index, slab in enumerate(self._slabs):
            assert slab.used == slab.next - len(slab.free)
            if slab.is_closed:
                assert index not in self._free_slabs
                continue
            assert (slab.slot == 0) == (index in self._free_slabs)
            assert slab.slot == 0 or (slab.used > 0 and slab.next * slab.slot <= slab.size <= self.slab_bytes)
            total += slab.used * slab.slot
            room[slab.slot] += slab.room
            if slab.slot and slab.room:
                assert index in self._open[slab.slot], "a slab with room is not on the list"
        assert total == self.used_bytes
        assert self.capacity == sum(slab.size for slab in self._slabs if not slab.is_closed)
        assert +room == +self._room
        for slot, size in self._class_bytes.items():
            assert size == sum(slab.size for slab in self._slabs if slab.slot == slot and not slab.is_closed)
