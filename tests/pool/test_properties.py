"""Allocator, eviction, store and placement under random calls, with their own `check()` after each."""

import threading
from collections import Counter
from collections.abc import Callable

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ems.wire.messages import Cause, Status
from kvloom.pool.allocator import SlabAllocator, slot_bytes
from kvloom.pool.budget import Budget, RateLimit
from kvloom.pool.entries import Entry, Geometry, Place
from kvloom.pool.evict import Lru, Order, S3Fifo
from kvloom.pool.placement import Breaker, home
from kvloom.pool.store import TenantPool

SLAB = 1 << 16


class AllocatorMachine(RuleBasedStateMachine):
    """Places never overlap, whatever the order of sizes and frees."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = SlabAllocator(SLAB)
        self.allocator.grow(4)
        self.live: dict[int, int] = {}

    @rule(length=st.integers(1, SLAB), count=st.integers(1, 20))
    def allocate(self, length: int, count: int) -> None:
        offsets = self.allocator.allocate(length, count)
        assert len(offsets) <= count
        for offset in offsets:
            assert offset + length <= self.allocator.capacity
            assert offset // SLAB == (offset + length - 1) // SLAB
            assert all(offset + length <= o or o + n <= offset for o, n in self.live.items())
            self.live[offset] = length

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data) -> None:
        offset = data.draw(st.sampled_from(sorted(self.live)))
        self.allocator.free(offset)
        del self.live[offset]

    @invariant()
    def holds(self) -> None:
        self.allocator.check()
        assert self.allocator.used_bytes == sum(slot_bytes(n) for n in self.live.values())


class EvictMachine(RuleBasedStateMachine):
    """Every key that was added is in until removed; a victim is never a kept key, and there is one if any may go."""

    new_order: Callable[[], Order] = S3Fifo

    def __init__(self) -> None:
        super().__init__()
        self.queue = self.new_order()
        self.model: set[bytes] = set()

    @rule(key=st.binary(min_size=1, max_size=1), kept=st.sets(st.binary(min_size=1, max_size=1), max_size=4))
    def use(self, key: bytes, kept: set[bytes]) -> None:
        if key in self.model:
            self.queue.touch(key)
        else:
            self.queue.add(key)
            self.model.add(key)
        victim = self.queue.victim(lambda candidate: candidate in kept)
        assert (victim is None) == (self.model <= kept)
        assert victim not in kept

    @rule(key=st.binary(min_size=1, max_size=1))
    def remove(self, key: bytes) -> None:
        self.queue.remove(key)
        self.model.discard(key)

    @rule()
    def evict(self) -> None:
        victim = self.queue.victim(lambda _key: False)
        if victim is not None:
            self.queue.remove(victim)
            self.model.remove(victim)

    @invariant()
    def holds(self) -> None:
        self.queue.check()
        assert len(self.queue) == len(self.model)
        assert all(key in self.queue for key in self.model)


class LruMachine(EvictMachine):
    new_order = Lru


def test_the_least_recently_used_key_goes_first():
    order = Lru()
    for key in (b"a", b"b", b"c"):
        order.add(key)
    order.touch(b"a")
    assert order.victim(lambda key: key == b"b") == b"c"
    order.remove(b"b")
    order.remove(b"c")
    assert order.victim(lambda _key: False) == b"a"


def test_new_keys_stay_while_those_before_them_were_used():
    queue = S3Fifo()
    for n in range(1000):
        queue.add(n.to_bytes(2, "big"))
        queue.touch(n.to_bytes(2, "big"))
    new = {n.to_bytes(2, "big") for n in range(1000, 1080)}
    for key in new:
        queue.add(key)
    for _ in range(200):
        victim = queue.victim(lambda _key: False)
        assert victim not in new
        queue.remove(victim)


class StoreMachine(RuleBasedStateMachine):
    """What is found has the bytes that were published; what is pinned keeps them; a chain is cut from its end."""

    def __init__(self) -> None:
        super().__init__()
        budget = Budget(1 << 18)
        budget.set_limits("t", 0, 1 << 18)
        self.pool = TenantPool("t", budget, Geometry(1 << 17, SLAB), True, 0.25)
        self.truth: dict[bytes, bytes] = {}
        self.pinned: list[Entry] = []
        self.places: list[Place] = []

    keys = st.integers(0, 30).map(lambda n: bytes([n]) * 32)

    @rule(key=keys, parent=keys, length=st.sampled_from([100, 5000, 9000, 30000]), rcache=st.booleans())
    def write(self, key: bytes, parent: bytes, length: int, rcache: bool) -> None:
        place = self.pool.begin(key, length, rcache)
        if isinstance(place, Entry):
            self.pool.unpin([place])
        elif isinstance(place, Place):
            data = bytes([key[0], length % 251]) * (length // 2)
            view = self.pool.view(place.offset, place.length)
            view[:] = memoryview(data)
            status, entry = self.pool.publish(place, xxhash.xxh3_128_digest(data), parent)
            assert status == Status.STORED
            self.truth[key] = data
            self.pool.unpin([entry])

    @rule(key=keys)
    def begin_and_hold(self, key: bytes) -> None:
        place = self.pool.begin(key, 5000)
        if isinstance(place, Place) and len(self.places) < 3:
            self.places.append(place)
        elif isinstance(place, Place):
            self.pool.abandon(place)
        elif isinstance(place, Entry):
            self.pool.unpin([place])

    @precondition(lambda self: self.places)
    @rule()
    def abandon(self) -> None:
        self.pool.abandon(self.places.pop())

    @rule(keys=st.lists(keys, max_size=3))
    def pin(self, keys: list[bytes]) -> None:
        self.pinned += self.pool.pin_prefix(keys)

    @rule()
    def unpin(self) -> None:
        self.pool.unpin(self.pinned)
        self.pinned = []

    @rule(
        keys=st.lists(keys, min_size=1, max_size=12), length=st.sampled_from([100, 5000, 30000]), rcache=st.booleans()
    )
    def write_batch(self, keys: list[bytes], length: int, rcache: bool) -> None:
        found = self.pool.begin_all(keys, [length] * len(keys), [rcache] * len(keys))
        assert len(found) == len(keys) or isinstance(found[-1], Status)
        data = bytes([length % 251]) * length
        written = []
        for place in found:
            if isinstance(place, Place):
                self.pool.view(place.offset, place.length)[:] = memoryview(data)
                written.append((place, xxhash.xxh3_128_digest(data), b""))
        published = self.pool.publish_all(written)
        self.truth |= {entry.key: data for status, entry in published if status == Status.STORED}
        self.pool.unpin(
            [entry for _status, entry in published] + [place for place in found if isinstance(place, Entry)]
        )

    @rule(size=st.integers(1, 1 << 16))
    def evict(self, size: int) -> None:
        self.pool.evict(size)

    @rule(length=st.sampled_from([4096, 8192, 30720]), count=st.integers(1, 20))
    def make_room_ahead(self, length: int, count: int) -> None:
        before = self.pool.usage()["used_bytes"]
        while self.pool.make_room_ahead(length, count):
            pass
        assert before - self.pool.usage()["used_bytes"] <= (1 << 18) // 16 + 30720, "a small share, to the next block"

    @rule(key=keys)
    def explain(self, key: bytes) -> None:
        if self.pool.missing([key]):
            assert self.pool.why_missing(key) == (Cause.EVICTED if key in self.truth else Cause.COLD)

    @invariant()
    def holds(self) -> None:
        self.pool.check()
        for entry in self.pinned:
            assert self.pool.view(entry.offset, entry.length).tobytes() == self.truth[entry.key]

    def teardown(self) -> None:
        self.pool.close()


for machine in (AllocatorMachine, EvictMachine, LruMachine, StoreMachine):
    machine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestAllocator = AllocatorMachine.TestCase
TestEvict = EvictMachine.TestCase
TestLru = LruMachine.TestCase
TestStore = StoreMachine.TestCase


def new_pool(size: int = 1 << 18) -> TenantPool:
    budget = Budget(size)
    budget.set_limits("t", 0, size)
    return TenantPool("t", budget, Geometry(1 << 17, SLAB), True, 0.25)


def put(pool: TenantPool, number: int, parent: bytes = b"", length: int = 8192) -> bytes:
    key = number.to_bytes(32, "big")
    place = pool.begin(key, length)
    assert isinstance(place, Place)
    pool.unpin([pool.publish(place, bytes(16), parent)[1]])
    return key


def test_a_chain_goes_from_its_end():
    pool = new_pool()
    keys = [b""]
    for number in range(32):
        keys.append(put(pool, number, keys[-1]))
    for left in range(31, 20, -1):
        pool.evict(1)
        assert pool.count_prefix(keys[1:]) == left
    pool.close()


def test_a_scan_does_not_push_out_what_is_used():
    pool = new_pool()
    hot = [put(pool, number) for number in range(8)]
    for number in range(1000, 1200):
        pool.unpin(pool.pin_prefix(hot))
        put(pool, number)
    assert pool.count_prefix(hot) == 8
    pool.close()


def put_batch(pool: TenantPool, numbers: range) -> list[Entry]:
    """Blocks of 8 KiB, pinned."""
    places = pool.begin_all(
        [number.to_bytes(32, "big") for number in numbers], [8192] * len(numbers), [False] * len(numbers)
    )
    return [entry for _status, entry in pool.publish_all([(place, bytes(16), b"") for place in places])]


def test_after_a_batch_there_is_room_for_the_next():
    pool = new_pool(1 << 20)
    pool.unpin(put_batch(pool, range(120)))
    batch = put_batch(pool, range(200, 208))
    while pool.make_room_ahead(8192, 8):
        pass
    assert pool.usage()["used_bytes"] == (1 << 20) - 8 * 8192
    assert pool.count_prefix([entry.key for entry in batch]) == 8, "it is pinned"
    pool.unpin(batch)
    evicted = pool.counts["evicted"]
    pool.unpin(put_batch(pool, range(300, 308)))
    assert pool.counts["evicted"] == evicted
    pool.check()
    pool.close()


def test_no_more_than_a_sixteenth_is_kept_free():
    pool = new_pool(1 << 20)
    pool.unpin(put_batch(pool, range(128)))
    while pool.make_room_ahead(8192, 100):
        pass
    assert pool.usage()["used_bytes"] == (1 << 20) * 15 // 16
    pool.close()


def test_a_batch_of_a_full_pool_takes_the_places_of_others_once():
    pool = new_pool(1 << 20)
    pool.unpin(put_batch(pool, range(128)))
    keys = [number.to_bytes(32, "big") for number in (*range(100, 128), *range(200, 210))]
    found = pool.begin_all(keys, [8192] * len(keys), [False] * len(keys))
    assert [type(place) for place in found] == [Entry] * 28 + [Place] * 10
    assert pool.counts["evicted"] == 10
    pool.close()


def test_a_full_pool_changes_to_other_sizes():
    pool = new_pool()
    for number in range(32):
        put(pool, number, length=8192)
    for number in range(100, 120):
        put(pool, number, length=30000)
    pool.check()
    pool.close()


@given(st.lists(st.integers(0, 2**64), min_size=200, max_size=200, unique=True))
@settings(max_examples=10, deadline=None)
def test_a_joining_node_takes_its_share_and_moves_nothing_else(numbers):
    keys = [number.to_bytes(32, "big") for number in numbers]
    before = {key: home(key, ["a", "b", "c"]) for key in keys}
    after = {key: home(key, ["d", "c", "b", "a"]) for key in keys}
    moved = [key for key in keys if after[key] != before[key]]
    assert all(after[key] == "d" for key in moved)
    assert len(moved) < len(keys) / 2


def test_homes_are_spread_evenly():
    count = Counter(home(number.to_bytes(32, "big"), ["a", "b", "c", "d"]) for number in range(4000))
    assert all(850 < each < 1150 for each in count.values())


def test_the_breaker_opens_tries_once_and_closes():
    breaker = Breaker()
    breaker.fail(0.0)
    assert breaker.allows(0.0)
    breaker.fail(0.0)
    assert not breaker.allows(0.4)
    assert breaker.allows(0.6)
    assert not breaker.allows(0.6), "one call tries, the others wait for its outcome"
    breaker.fail(0.7)
    assert not breaker.allows(1.6)
    assert breaker.allows(1.8)
    breaker.succeed()
    assert breaker.allows(1.8)
    assert not breaker.is_open(1.8)


def test_guarantees_are_kept_for_their_tenants():
    budget = Budget(100)
    assert budget.set_limits("a", 40, 80)
    assert budget.set_limits("b", 0, 100)
    assert not budget.set_limits("c", 70, 70)
    assert [budget.take("b", 20) for _ in range(4)] == [True, True, True, False]
    assert [budget.take("a", 20) for _ in range(3)] == [True, True, False]
    budget.check()


@pytest.mark.parametrize("length", [1, 4096, 4097, 65536, 1 << 20, (1 << 20) + 1])
def test_a_size_class_wastes_at_most_an_eighth(length):
    assert length <= slot_bytes(length) <= max(4096, length * 9 // 8 + 512)


def test_readers_and_writers_in_threads_keep_the_invariants():
    pool = new_pool()
    errors = []

    def churn(seed: int) -> None:
        try:
            for number in range(300):
                key = ((number * 7 + seed) % 60).to_bytes(32, "big")
                place = pool.begin(key, 8192)
                if isinstance(place, Place):
                    pool.unpin([pool.publish(place, bytes(16))[1]])
                elif isinstance(place, Entry):
                    pool.unpin([place])
                pool.unpin(pool.pin_prefix([key]))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    pool.check()
    pool.close()


def test_a_rate_is_kept_on_average_and_no_size_waits_for_ever():
    limit = RateLimit(100)
    assert limit.take(150, 10.0), "one second's worth at once, the last overdraws"
    assert not limit.take(1, 10.4)
    assert limit.take(1000, 10.6)
    assert not limit.take(1, 20.4)
    assert limit.take(1, 20.6)
    assert [limit.take(60, 1000.0) for _ in range(3)] == [True, True, False]
