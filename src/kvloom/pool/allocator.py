"""SlabAllocator: which byte range of a tenant's pool a block gets. Pure.

The pool is a row of slabs of equal size. A slab serves slots of one size class at a time; when its last slot is freed
it can serve another class. Both calls are O(1), and the waste is at most the rounding of a class (12.5 %) plus the end
of a slab.
"""

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
    slot: int = 0  # size class, 0 = free
    used: int = 0  # slots handed out
    free: set[int] = field(default_factory=set)  # slot indices given back
    next: int = 0  # slots from here on were never handed out


class SlabAllocator:
    """Offsets into [0, capacity). `grow` adds slabs; memory is never given back."""

    def __init__(self, slab_bytes: int) -> None:
        self.slab_bytes = slab_bytes
        self._slabs: list[_Slab] = []
        self._free_slabs: list[int] = []
        self._open: dict[int, list[int]] = {}  # class -> slabs with a free slot (may be stale; checked on use)
        self.used_bytes = 0  # of handed-out slots

    @property
    def capacity(self) -> int:
        return len(self._slabs) * self.slab_bytes

    def grow(self, num_slabs: int) -> None:
        """Adds fresh slabs at the end of the range."""
        start = len(self._slabs)
        self._slabs += [_Slab() for _ in range(num_slabs)]
        self._free_slabs += range(start + num_slabs - 1, start - 1, -1)

    def allocate(self, length: int, count: int = 1) -> list[int]:
        """Offsets of free places for `length` bytes each: as many of `count` as one slab has; none = no room."""
        slot = slot_bytes(length)
        index = self._slab_for(slot) if slot <= self.slab_bytes else None
        if index is None:
            return []
        slab = self._slabs[index]
        positions = [slab.free.pop() for _ in range(min(count, len(slab.free)))]
        fresh = min(count - len(positions), self.slab_bytes // slot - slab.next)
        positions += range(slab.next, slab.next + fresh)
        slab.next += fresh
        slab.used += len(positions)
        self.used_bytes += slot * len(positions)
        start = index * self.slab_bytes
        return [start + position * slot for position in positions]

    def _slab_for(self, slot: int) -> int | None:
        open_slabs = self._open.setdefault(slot, [])
        while open_slabs:
            slab = self._slabs[open_slabs[-1]]
            if slab.slot == slot and (slab.free or slab.next < self.slab_bytes // slot):
                return open_slabs[-1]
            open_slabs.pop()
        if not self._free_slabs:
            return None
        index = self._free_slabs.pop()
        self._slabs[index] = _Slab(slot=slot)
        open_slabs.append(index)
        return index

    def free(self, offset: int) -> None:
        """Gives back the place at `offset`, which `allocate` returned and nobody freed since."""
        index, inner = divmod(offset, self.slab_bytes)
        slab = self._slabs[index]
        position = inner // max(1, slab.slot)
        is_place = slab.slot and inner % slab.slot == 0 and position < slab.next and position not in slab.free
        assert is_place, "not a place in use"
        slab.used -= 1
        self.used_bytes -= slab.slot
        if slab.used == 0:
            self._slabs[index] = _Slab()
            self._free_slabs.append(index)
            return
        if not slab.free and slab.next == self.slab_bytes // slab.slot:
            self._open[slab.slot].append(index)
        slab.free.add(position)

    def slab_of(self, offset: int) -> int:
        return offset // self.slab_bytes

    def count(self, slab: int) -> int:
        """Slots of a slab that are handed out."""
        return self._slabs[slab].used

    def slabs_by_use(self, other_than: int) -> list[int]:
        """Slabs in use by classes other than `other_than`, emptiest first: candidates for another class."""
        busy = [(slab.used * slab.slot, i) for i, slab in enumerate(self._slabs) if slab.slot not in (0, other_than)]
        return [index for _used, index in sorted(busy)]

    def check(self) -> None:
        """States the invariants: counts agree, free lists hold no place twice, a free slab has no class."""
        assert len(set(self._free_slabs)) == len(self._free_slabs)
        total = 0
        for index, slab in enumerate(self._slabs):
            assert (slab.slot == 0) == (index in self._free_slabs)
            assert slab.used == slab.next - len(slab.free)
            assert slab.slot == 0 or (slab.used > 0 and slab.next * slab.slot <= self.slab_bytes)
            total += slab.used * slab.slot
            if slab.slot and (slab.free or slab.next < self.slab_bytes // slab.slot):
                assert index in self._open[slab.slot], "a slab with room is not on the list"
        assert total == self.used_bytes
