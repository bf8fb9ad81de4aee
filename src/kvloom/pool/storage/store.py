"""TenantPool: a tenant's blocks kept in Python: index, memory, pins, eviction. One lock guards the index; bytes are
copied without it.

Used where the library is not available, and as the reference that `NativePool` is compared with.
"""

import logging
import threading
from collections.abc import Callable, Iterable

import xxhash

from ems.runs import Bytes
from ems.wire.messages import Cause, Status
from kvloom.pool.storage.allocator import slot_bytes
from kvloom.pool.storage.budget import Budget
from kvloom.pool.storage.entries import Begun, Block, Entry, Geometry, NoRoom, Published, Reservation, Written
from kvloom.pool.storage.entrywise import EntryArrival, EntryOffer, HeldEntries
from kvloom.pool.storage.evict import Classes, Order, S3Fifo
from kvloom.pool.storage.index import Index
from kvloom.pool.storage.memory import TenantMemory
from kvloom.pool.storage.passing import Announced
from kvloom.pool.storage.pool import Batch, Pool, Refused, Saved

log = logging.getLogger(__name__)

_MAX_EVICTIONS = 4096  # rounds of evictions to make room for one block
_AHEAD_SHARE = 1 / 16  # share of a quota that is kept free at most, for the next batch
_AHEAD_BLOCKS = 64  # blocks evicted at a time, while other requests wait


class TenantPool(Pool):
    """All methods may be called from any thread."""

    def __init__(
        self,
        tenant: str,
        budget: Budget,
        geometry: Geometry,
        rcache_share: float,
        new_order: Callable[[], Order] = S3Fifo,
    ) -> None:
        """As `Pool`. new_order: creates the eviction order of a size class."""
        super().__init__(tenant, budget, geometry, rcache_share)
        self._lock = threading.Lock()
        self._memory = TenantMemory(tenant, budget, geometry)
        self._index = Index(self._memory, Classes(new_order))

    # Reading

    def hold_prefix(self, keys: list[bytes]) -> HeldEntries:
        return HeldEntries(self, self.pin_prefix(keys))

    def pin_prefix(self, keys: list[bytes]) -> list[Block]:
        found: list[Block] = []
        with self._lock:
            for key in keys:
                entry = self._index.get(key)
                if entry is None:
                    break
                entry.pins += 1
                self._index.touch(entry)
                found.append(entry)
        return found

    def pin_each(self, keys: list[bytes]) -> list[Block | None]:
        with self._lock:
            entries = [self._index.get(key) for key in keys]
            for entry in entries:
                if entry is not None:
                    entry.pins += 1
                    self._index.touch(entry)
            return list(entries)

    def offer(self, keys: list[bytes]) -> EntryOffer:
        return EntryOffer(self, keys)

    def arrive(self, blocks: Announced) -> EntryArrival:
        return EntryArrival(self, blocks)

    def pin_again(self, entry: Block) -> None:
        assert isinstance(entry, Entry)
        with self._lock:
            entry.pins += 1

    def count_prefix(self, keys: list[bytes]) -> int:
        with self._lock:
            return next((i for i, key in enumerate(keys) if self._index.get(key) is None), len(keys))

    def unpin(self, entries: list[Block]) -> None:
        with self._lock:
            for entry in entries:
                assert isinstance(entry, Entry)
                entry.pins -= 1
                if entry.pins == 0 and not entry.is_live:
                    self._release(entry)

    def _release(self, entry: Entry) -> None:
        """Free the memory of a block that has neither key nor pins."""
        if entry.is_spoiled:
            self._memory.spoil(entry.offset)
        else:
            self._memory.free(entry.offset)

    def missing(self, keys: list[bytes]) -> list[bytes]:
        with self._lock:
            return [key for key in keys if self._index.get(key) is None]

    def missed(self, key: bytes, count: int) -> Cause:
        with self._lock:
            return self._index.missed(key, count)

    def view(self, offset: int, length: int) -> Bytes:
        return self._memory.view(offset, length)

    def segment_fd(self, segment: int) -> int | None:
        return self._memory.segment_fd(segment)

    @property
    def num_given_back(self) -> int:
        return self._memory.num_given_back

    # Writing

    def begin_all(self, keys: list[bytes], lengths: list[int], is_rcache: list[bool]) -> list[Begun]:
        return self._begin_all(keys, lengths, is_rcache, None)

    def _begin_all(
        self, keys: list[bytes], lengths: list[int], is_rcache: list[bool], refused: list[Refused] | None
    ) -> list[Begun]:
        found: list[Begun] = []
        is_alike = len(set(lengths)) == 1 and not any(is_rcache)
        free: list[int] = []  # offsets freed together, for the keys to come
        with self._lock:
            num_new = sum(self._index.get(key) is None for key in keys) if is_alike else 1
            for key, length, is_copy in zip(keys, lengths, is_rcache, strict=True):
                entry = self._index.get(key)
                if entry is not None:
                    entry.pins += 1
                    found.append(entry)
                    continue
                slot = slot_bytes(length)
                if not free and slot <= self.geometry.slab_bytes:
                    free = self._make_room(slot, is_copy, max(1, num_new) * slot)[::-1]
                if not free:
                    found.append(NoRoom(self._refuse(key, slot, refused)))
                    break
                found.append(Reservation(key, free.pop(), length, slot, is_copy))
                num_new -= 1
            for offset in free:
                self._memory.free(offset)
        return found

    def _capacity(self) -> int:
        return self._memory.capacity

    def _remember(self, key: bytes, cause: Cause) -> None:
        self._index.remember(key, cause)

    def save(self, batch: Batch) -> Saved:
        keys, areas = batch.keys, batch.areas
        parents = [batch.parent, *keys] if batch.parent is not None else [b""] * len(keys)
        refused: list[Refused] = []
        found = self._begin_all(keys, list(areas.lengths), batch.is_rcache, refused)
        written = []
        for begun, area, parent in zip(found, areas, parents, strict=False):
            if isinstance(begun, Reservation):
                view = self.view(begun.offset, begun.length)
                view[:] = area
                written.append(Written(begun, xxhash.xxh3_128_digest(view.data), parent))
        with self._lock:
            published = iter([self._publish(each, refused) for each in written])
        statuses, entries = bytearray(), []
        for begun, area in zip(found, areas, strict=False):
            if isinstance(begun, Reservation):
                status, entry = next(published)
            elif isinstance(begun, NoRoom):
                statuses.append(begun.status)
                break
            else:
                is_same = begun.length == len(area) and begun.checksum == xxhash.xxh3_128_digest(area.data)
                status, entry = Status.DUPLICATE if is_same else Status.CONFLICT, begun
            statuses.append(status)
            entries.append(entry)
        return Saved(statuses, HeldEntries(self, entries), statuses.count(Status.STORED), refused)

    def publish(self, written: Written) -> Published:
        with self._lock:
            return self._publish(written)

    def publish_all(self, written: list[Written]) -> list[Published]:
        with self._lock:
            return list(map(self._publish, written))

    def _publish(self, written: Written, refused: list[Refused] | None = None) -> Published:
        key, offset, length, slot, is_rcache = written.reservation
        entry = self._index.get(key)
        if entry is not None:
            self._memory.free(offset)
            entry.pins += 1
            is_same = entry.length == length and entry.checksum == written.checksum
            return Published(Status.DUPLICATE if is_same else Status.CONFLICT, entry)
        if self._memory.is_leaving(offset):
            queue = self._index.orders.of(slot, is_rcache)
            entry = Entry(key, offset, length, slot, written.checksum, is_rcache, None, queue, pins=1, is_live=False)
            return Published(self._refuse(key, slot, refused), entry)
        return Published(Status.STORED, self._index.add(written))

    def abandon(self, reservation: Reservation) -> None:
        with self._lock:
            self._memory.free(reservation.offset)

    def _spoil(self, entry: Block) -> bool:
        assert isinstance(entry, Entry)
        with self._lock:
            if not entry.is_live:
                return False
            self._index.forget(entry, Cause.CORRUPT)
            entry.is_spoiled = True
            return True

    def evict(self, size: int) -> int:
        with self._lock:
            freed = 0
            while (segment := self._memory.coldest_segment(is_idle=True)) is not None:
                held = sum(entry.slot for entry in self._memory.blocks_of(segment))
                if held > size - freed:
                    break
                self._give_back(segment)
                freed += held
            while freed < size and (gone := self._evict(self._index.orders.every(), size - freed)):
                freed += self._free(gone)
            return freed

    def shrink(self, size: int) -> None:
        while size > 0:
            with self._lock:
                segment = self._memory.coldest_segment()
                if segment is None:
                    return
                size -= self._give_back(segment)

    def _give_back(self, segment: int) -> int:
        gone = self._memory.blocks_of(segment)
        for entry in gone:
            self._index.forget(entry, Cause.EVICTED)
        self.counts.add("evicted", len(gone))
        self._free(entry for entry in gone if not entry.pins)
        return self._memory.give_back(segment)

    def _free(self, gone: Iterable[Entry]) -> int:
        """Free the memory of removed blocks that are not pinned. Returns the bytes."""
        freed = 0
        for entry in gone:
            self._memory.free(entry.offset)
            freed += entry.slot
        return freed

    # Room

    def make_room_ahead(self, slot: int, count: int) -> bool:
        with self._lock:
            share = int(min(self._budget.quota(self.tenant), self._memory.capacity) * _AHEAD_SHARE)
            lacking = min(count, share // slot) * slot - self._memory.room(slot)
            if lacking <= 0:
                return False
            if self._grow():
                return True
            if self._memory.wants_slab(slot):
                return False  # a whole slab lasts long and takes time: only when it is needed
            gone = self._evict(self._index.orders.of_slot(slot), min(lacking, _AHEAD_BLOCKS * slot))
            self._free(gone)
            return bool(gone)

    def _make_room(self, slot: int, is_rcache: bool, wanted: int) -> list[int]:
        """Offsets of free slots of that size, at least one, within the tenant's limits; none when only pinned blocks
        are in the way.

        wanted: bytes that are worth freeing at once.
        """
        for _ in range(_MAX_EVICTIONS):
            if is_rcache and self._has_many_copies(slot):
                gone = self._evict(self._index.orders.copies(), wanted)
                if not gone:  # all copies are being read: another one only fits into unused memory
                    while not (offsets := self._memory.allocate(slot, 1)) and self._grow():
                        pass
                    return offsets
            else:
                offsets = self._memory.allocate(slot, 1 if is_rcache else max(1, wanted // slot))
                if offsets:
                    return offsets
                if self._grow() or self._clear_slab(slot):
                    continue
                gone = self._evict(self._index.orders.of_slot(slot), wanted)
                if not gone and not self._clear_slab(slot, is_forced=True):
                    return []
            is_within = not is_rcache or not self._has_many_copies(slot)
            fitting = [entry.offset for entry in gone if entry.slot == slot] if is_within else []
            self._free(entry for entry in gone if not is_within or entry.slot != slot)
            if fitting:
                return fitting
        return []

    def _evict(self, orders: list[Order], wanted: int) -> list[Entry]:
        """Remove blocks of the first order that has a victim, until `wanted` bytes; the caller owns their memory."""
        gone = self._index.evict(orders, wanted)
        self.counts.add("evicted", len(gone))
        return gone

    def _has_many_copies(self, slot: int) -> bool:
        """Whether one more copy of another node's block would exceed their share."""
        return self._index.rcache_bytes + slot > self._budget.quota(self.tenant) * self._rcache_share

    def _grow(self) -> bool:
        """Takes more memory, if the tenant may have it."""
        try:
            is_grown = self._memory.grow()
        except OSError as error:
            if not self._has_no_memory:
                log.warning("tenant %s: the system gives no more memory for blocks: %s", self.tenant, error)
            self._has_no_memory = True
            return False
        self._has_no_memory = self._has_no_memory and not is_grown
        return is_grown

    def _clear_slab(self, slot: int, is_forced: bool = False) -> bool:
        """Empty a slab of a less useful class; is_forced: of the least useful one."""
        gone = self._memory.slab_to_clear(slot, is_forced)
        for entry in gone:
            self._index.forget(entry, Cause.EVICTED)
        self.counts.add("evicted", len(gone))
        self._free(gone)
        return bool(gone)

    # Knowing

    def warm(self) -> None:
        while True:
            with self._lock:
                if not self._grow():
                    return
            if not self._memory.prefault():
                return

    def block_keys(self) -> list[bytes]:
        with self._lock:
            return list(self._index.entries)

    def usage(self) -> dict[str, int]:
        with self._lock:
            return {
                "blocks": len(self._index.entries),
                "used_bytes": self._memory.used_bytes,
                "capacity_bytes": self._memory.capacity,
                "rcache_bytes": self._index.rcache_bytes,
                "quota_bytes": self._budget.quota(self.tenant),
            }

    def close(self) -> None:
        with self._lock:
            self._memory.close()

    def check(self) -> None:
        with self._lock:
            self._memory.check(list(self._index.entries.values()))
            self._budget.check()
            self._index.check()
