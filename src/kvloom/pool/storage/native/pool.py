"""NativePool: a tenant's blocks kept in C++: one call a batch looks up, allocates, copies, sums, publishes and pins.

What needs the node or the system stays in Python: the budget, the segments, the counters.
"""

import ctypes
import logging
import secrets
import threading
import weakref

import numpy as np
import numpy.typing as npt

from ems.common.channel import Channel
from ems.keys import KEY_BYTES
from ems.runs import Areas, Bytes, address_of
from ems.wire import messages as m
from ems.wire.messages import Cause, Status
from kvloom.pool.storage.allocator import slot_bytes
from kvloom.pool.storage.budget import Budget
from kvloom.pool.storage.counts import Counts
from kvloom.pool.storage.entries import Begun, Block, Geometry, NoRoom, Published, Reservation, Written
from kvloom.pool.storage.native import library as c
from kvloom.pool.storage.native.held import HeldBlocks, NativeArrival, NativeBlock, NativeOffer
from kvloom.pool.storage.native.serving import Asks, NativeServing, Tally, callbacks
from kvloom.pool.storage.passing import Announced, Spans
from kvloom.pool.storage.pool import Batch, Pool, Refused, Saved, Terms
from kvloom.pool.storage.segments import SharedMemory, take_slab

log = logging.getLogger(__name__)
_AHEAD_SHARE = 1 / 16  # share of a quota that is kept free at most, for the next batch
Ids = npt.NDArray[np.uint32]


class NativePool(Pool):
    """All methods may be called from any thread."""

    def __init__(
        self,
        tenant: str,
        budget: Budget,
        geometry: Geometry,
        rcache_share: float,
        how: tuple[c.Functions, bool],
    ) -> None:
        """As `Pool`. how: the library, and whether the least recently used goes first, instead of S3-FIFO."""
        super().__init__(tenant, budget, geometry, rcache_share)
        functions, is_lru = how
        self.functions = functions
        self._short, self._long = functions.short, functions.of_batches
        self.handle = self._short.pool_open(geometry.segment_bytes, geometry.slab_bytes, is_lru, secrets.randbits(64))
        self._glance: c.Glance = self._short.pool_glance(self.handle).contents
        self._segments: list[SharedMemory | None] = []  # None = given back; its number is never reused
        self._growing = threading.Lock()  # held while memory is taken or given back
        self.budget_version, self.copies_share = budget.version, rcache_share
        me = weakref.proxy(self)  # so that a pool without references is freed at once
        self._asked = callbacks(
            Asks(
                lambda: me._look(),
                lambda: me._grow_and_look(),
                lambda key, slot: me._refuse(key, slot),
                lambda: me._close_left(),
            )
        )
        self._tally, self._tallying = Tally(self._glance.counts), threading.Lock()
        self._look()

    def __del__(self) -> None:
        self._short.pool_close(self.handle)

    @property
    def counts(self) -> Counts:
        if self._tally.is_behind:
            with self._tallying:
                self._tally.add_to(self._counts)
        if self._glance.num_evicted:
            self._counts.raise_to("evicted", self._glance.num_evicted)
        return self._counts

    # Reading

    def hold_prefix(self, keys: list[bytes]) -> HeldBlocks:
        held = HeldBlocks(self, len(keys))
        held.pin(b"".join(keys))
        return held

    def pin_prefix(self, keys: list[bytes]) -> list[Block]:
        return self.hold_prefix(keys).blocks()

    def pin_each(self, keys: list[bytes]) -> list[Block | None]:
        ids: Ids = np.empty(len(keys), np.uint32)
        self._short.pool_pin_each(self.handle, b"".join(keys), len(keys), address_of(ids), None, None)
        return [NativeBlock(self, id) if id != c.NONE else None for id in ids.tolist()]

    def offer(self, keys: list[bytes]) -> NativeOffer:
        return NativeOffer(self, keys)

    def pin_again(self, entry: Block) -> None:
        self._short.pool_pin_again(self.handle, _id(entry))

    def unpin(self, entries: list[Block]) -> None:
        self.unpin_all(np.array(list(map(_id, entries)), np.uint32))

    def unpin_all(self, ids: Ids) -> None:
        """Ends a pin of each."""
        self._short.pool_unpin(self.handle, address_of(ids), len(ids))
        self._close_left()

    def count_prefix(self, keys: list[bytes]) -> int:
        return int(self._short.pool_count_prefix(self.handle, b"".join(keys), len(keys)))

    def missing(self, keys: list[bytes]) -> list[bytes]:
        has = np.empty(len(keys), np.uint8)
        self._short.pool_has(self.handle, b"".join(keys), len(keys), address_of(has))
        return [key for key, is_here in zip(keys, has.tolist(), strict=True) if not is_here]

    def missed(self, key: bytes, count: int) -> Cause:
        return Cause(self._short.pool_missed(self.handle, key, count))

    def view(self, offset: int, length: int) -> Bytes:
        number, inner = self.locate(offset)
        segment = self._segments[number]
        assert segment is not None, "nothing is handed out of it"
        return segment.data[inner : inner + length]

    def segment_fd(self, segment: int) -> int | None:
        found = self._segments[segment] if 0 <= segment < len(self._segments) else None
        return found.fd if found is not None else None

    @property
    def num_given_back(self) -> int:
        return self._glance.num_given_back

    # Sessions

    def board(self) -> SharedMemory | None:
        try:
            return SharedMemory("ems-board", m.BOARD_BYTES, is_sealed=False)
        except OSError:
            return None

    def serving(self, channel: Channel, terms: Terms) -> NativeServing:
        return NativeServing(self, channel, self._asked, terms)

    def _look(self) -> None:
        """Copy what C++ needs to know of the budget."""
        glance, budget = self._glance, self._budget
        glance.looked_at = budget.version.value
        glance.quota, glance.may_grow = budget.quota(self.tenant), budget.has_room(self.tenant)

    def _grow_and_look(self) -> bool:
        is_grown = self._grow()
        self._look()
        return is_grown

    # Writing

    def save(self, batch: Batch) -> Saved:
        held = HeldBlocks(self, len(batch.keys))
        areas = batch.areas.addresses()
        statuses = self._write(held, batch, address_of(areas))
        num_stored, refused = statuses.count(Status.STORED), list[Refused]()
        held.keep(len(statuses))
        for lost in (Status.NO_ROOM, c.LEFT):
            for i in _all_of(lost, statuses):
                statuses[i] = self._refuse(batch.keys[i], slot_bytes(batch.areas.lengths[i]), refused)
        return Saved(statuses, held, num_stored, refused)

    def begin_all(self, keys: list[bytes], lengths: list[int], is_rcache: list[bool]) -> list[Begun]:
        held = HeldBlocks(self, len(keys))
        statuses = self._write(held, Batch(keys, Areas({}, [], [], lengths), b"", is_rcache), None)
        found: list[Begun] = []
        for i, status in enumerate(statuses):
            slot = slot_bytes(lengths[i])
            if status == Status.STORED:
                found.append(Reservation(keys[i], int(held.offsets[i]), lengths[i], slot, is_rcache[i]))
            elif status == Status.NO_ROOM:
                found.append(NoRoom(self._refuse(keys[i], slot)))
            else:
                found.append(NativeBlock(self, int(held.ids[i])))
        return found

    def _write(self, held: HeldBlocks, batch: Batch, areas: int | None, spans: Spans | None = None) -> bytearray:
        """Returns a status a key, and adds the blocks to `held`. areas: the bytes; None = memory is only reserved.
        spans: set to that memory; then a key without room does not stop those behind it.
        """
        count = len(batch.keys)
        keys, held.lengths[:] = b"".join(batch.keys), batch.areas.lengths
        is_rcache, statuses = np.array(batch.is_rcache, np.uint8), np.empty(count, np.uint8)
        save = c.Save(
            keys,
            address_of(held.lengths),
            address_of(is_rcache),
            areas,
            batch.parent or None,
            address_of(statuses),
            address_of(held.ids),
            address_of(held.offsets),
            count,
            0,
            self._budget.quota(self.tenant) * self._rcache_share,
            self._budget.has_room(self.tenant),
            batch.parent is not None,
            spans is not None,
            None,
        )
        try:
            while self._call(save, spans) == c.NEEDS_MEMORY:
                save.may_grow = self._grow()
        except BaseException:
            if save.batch:
                self._short.pool_abandon_batch(self.handle, save)
            raise
        self._close_left()
        return bytearray(statuses[: save.num_done].tobytes())

    def _call(self, save: c.Save, spans: Spans | None) -> int:
        if not save.areas:
            return int(self._long.pool_begin(self.handle, save, None if spans is None else address_of(spans.rows)))
        return int(self._long.pool_save(self.handle, self.functions.xxh3, save))

    def arrive(self, blocks: Announced) -> NativeArrival:
        count = len(blocks.keys)
        held, spans = HeldBlocks(self, count), Spans(np.empty((count, 2), np.uint64))
        batch = Batch(blocks.keys, Areas({}, [], [], blocks.lengths), b"", [blocks.is_rcache] * count)
        statuses = self._write(held, batch, None, spans)
        for i in _all_of(Status.NO_ROOM, statuses):
            statuses[i] = self._refuse(blocks.keys[i], slot_bytes(blocks.lengths[i]))
        return NativeArrival(self, blocks, (held, statuses, spans))

    def settle(self, arrival: c.Arrival, blocks: Announced, statuses: npt.NDArray[np.uint8]) -> bytes:
        """Ends what `arrive` began. Returns what became of each; statuses: what `arrival` has for that."""
        self._short.pool_settle(self.handle, arrival)
        self._close_left()
        told = bytearray(statuses.tobytes())
        for i in _all_of(c.LEFT, told):
            told[i] = self._refuse(blocks.keys[i], slot_bytes(blocks.lengths[i]))
        return bytes(told)

    def publish(self, written: Written) -> Published:
        key, offset, length, slot, is_rcache = written.reservation
        block = c.Described(
            c.Key.from_buffer_copy(key),
            c.Sum.from_buffer_copy(written.checksum),
            offset=offset,
            length=length,
            slot=slot,
            is_rcache=is_rcache,
        )
        id = ctypes.c_uint32()
        parent = written.parent if len(written.parent) == KEY_BYTES else None
        status = self._short.pool_publish(self.handle, block, parent, id)
        self._close_left()
        if status == c.LEFT:
            status = self._refuse(key, slot)
        return Published(Status(status), NativeBlock(self, id.value))

    def abandon(self, reservation: Reservation) -> None:
        self._short.pool_abandon(self.handle, reservation.offset)
        self._close_left()

    def _spoil(self, entry: Block) -> bool:
        return bool(self._short.pool_spoil(self.handle, _id(entry)))

    def _capacity(self) -> int:
        return self._usage().capacity

    def _remember(self, key: bytes, cause: Cause) -> None:
        self._short.pool_remember(self.handle, key, int(cause))

    # Room

    def evict(self, size: int) -> int:
        order, outcome = c.Eviction(size, segment=-1, has_segments=1), c.MORE
        while outcome == c.MORE:
            closed = order.closed_bytes
            with self._growing:
                outcome = self._long.pool_evict(self.handle, order)
                if order.closed_bytes > closed:
                    self._budget.give_back(self.tenant, order.closed_bytes - closed)
            self._close_left()
        return order.freed

    def shrink(self, size: int) -> None:
        while size > 0:
            with self._growing:
                segment = ctypes.c_int64(-1)
                while (closed := int(self._long.pool_shrink(self.handle, segment))) == c.AGAIN:
                    pass
                if closed < 0:
                    return
                self._budget.give_back(self.tenant, closed)
            self._close_left()
            size -= closed

    def make_room_ahead(self, slot: int, count: int) -> bool:
        share = int(min(self._budget.quota(self.tenant), self._capacity()) * _AHEAD_SHARE)
        may_grow = self._budget.has_room(self.tenant)
        outcome = self._long.pool_make_room_ahead(self.handle, slot, count, share, may_grow)
        if outcome == c.NEEDS_MEMORY:
            if self._grow():
                return True
            outcome = self._long.pool_make_room_ahead(self.handle, slot, count, share, False)
        return bool(outcome == c.MORE)

    def _grow(self) -> bool:
        """Take more memory, if the tenant may have it."""
        with self._growing:
            try:
                is_grown = self._take_slab()
            except OSError as error:
                if not self._has_no_memory:
                    log.warning("tenant %s: the system gives no more memory for blocks: %s", self.tenant, error)
                self._has_no_memory = True
                return False
            self._has_no_memory = self._has_no_memory and not is_grown
            return is_grown

    def _take_slab(self) -> bool:
        """Complete the last slab, or add one. Raises OSError when the system has no memory."""
        geometry, usage = self.geometry, self._usage()
        size = self._budget.take(self.tenant, usage.num_missing or geometry.slab_bytes)
        if not size:
            return False
        slabs_a_segment = geometry.segment_bytes // geometry.slab_bytes
        is_first = not usage.num_missing and usage.num_slabs == len(self._segments) * slabs_a_segment
        try:
            segment = take_slab(self._segments, is_first, size, geometry, self._budget.headroom)
        except BaseException:
            self._budget.give_back(self.tenant, size)
            raise
        address = address_of(segment.data) if is_first and segment is not None else None
        self._short.pool_grow(self.handle, size, address)
        return True

    def _close_left(self) -> None:
        """Give unused segments that leave back to the system."""
        while self._glance.num_left:
            number = self._short.pool_take_left(self.handle)
            segment = self._segments[number] if number >= 0 else None
            if segment is not None:
                self._segments[number] = None
                segment.close()

    def warm(self) -> None:
        geometry = self.geometry
        slabs_a_segment = geometry.segment_bytes // geometry.slab_bytes
        while self._grow():
            number, index = divmod(self._usage().num_slabs - 1, slabs_a_segment)
            segment = self._segments[number]
            if segment is None or not segment.prefault(index * geometry.slab_bytes, geometry.slab_bytes):
                return

    # Knowing

    def block_keys(self) -> list[bytes]:
        most = self._usage().num_blocks
        keys = ctypes.create_string_buffer(most * KEY_BYTES)
        count = self._long.pool_keys(self.handle, keys, most)
        return [keys.raw[i * KEY_BYTES : (i + 1) * KEY_BYTES] for i in range(count)]

    def _usage(self) -> c.Usage:
        usage = c.Usage()
        self._short.pool_usage(self.handle, usage)
        return usage

    def usage(self) -> dict[str, int]:
        usage = self._usage()
        return {
            "blocks": usage.num_blocks,
            "used_bytes": usage.used_bytes,
            "capacity_bytes": usage.capacity,
            "rcache_bytes": usage.rcache_bytes,
            "quota_bytes": self._budget.quota(self.tenant),
        }

    def close(self) -> None:
        for segment in self._segments:
            if segment is not None:
                segment.close()

    def check(self) -> None:
        problem = self._long.pool_check(self.handle)
        assert problem is None, problem.decode()
        self._budget.check()


def _id(entry: Block) -> int:
    assert isinstance(entry, NativeBlock)
    return entry.id


def _all_of(status: int, statuses: bytearray) -> list[int]:
    """Where it stands."""
    return [i for i, each in enumerate(statuses) if each == status]
