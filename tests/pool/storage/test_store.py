"""A tenant's store under random calls in any order: its index, memory, pins and chains."""

import threading

import pytest
import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from ems.wire.messages import Cause, Status
from kvloom.pool.storage.budget import Budget
from kvloom.pool.storage.entries import Block, Geometry, NoRoom, Reservation, Written
from kvloom.pool.storage.opening import PoolOptions, open_pool
from kvloom.pool.storage.pool import Pool

SLAB = 1 << 16


@pytest.fixture(autouse=True, params=["1", "0"], ids=["native", "python"])
def _each_kind_of_pool(request, monkeypatch):
    monkeypatch.setenv("EMS_NATIVE", request.param)


class StoreMachine(RuleBasedStateMachine):
    """Found blocks have the bytes that were published; pinned ones keep them; a chain is evicted from its end."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = new_pool()
        self.truth: dict[bytes, bytes] = {}
        self.refused: set[bytes] = set()  # keys whose last write found no room
        self.pinned: list[Block] = []
        self.reserved: list[Reservation] = []

    keys = st.integers(0, 30).map(lambda n: bytes([n]) * 32)

    @rule(key=keys, parent=keys, length=st.sampled_from([100, 5000, 9000, 30000]), rcache=st.booleans())
    def write(self, key: bytes, parent: bytes, length: int, rcache: bool) -> None:
        begun = self.pool.begin(key, length, rcache)
        if isinstance(begun, Reservation):
            data = bytes([key[0], length % 251]) * (length // 2)
            view = self.pool.view(begun.offset, begun.length)
            view[:] = memoryview(data)
            status, entry = self.pool.publish(Written(begun, xxhash.xxh3_128_digest(data), parent))
            assert status == Status.STORED
            self.truth[key] = data
            self.refused.discard(key)
            self.pool.unpin([entry])
        elif begun == NoRoom(Status.NO_ROOM):
            self.refused.add(key)
        else:
            self.pool.unpin([begun])

    @rule(key=keys)
    def begin_and_hold(self, key: bytes) -> None:
        begun = self.pool.begin(key, 5000)
        if isinstance(begun, Reservation) and len(self.reserved) < 3:
            self.reserved.append(begun)
        elif isinstance(begun, Reservation):
            self.pool.abandon(begun)
        elif isinstance(begun, NoRoom):
            self.refused.add(key)
        else:
            self.pool.unpin([begun])

    @precondition(lambda self: self.reserved)
    @rule()
    def abandon(self) -> None:
        self.pool.abandon(self.reserved.pop())

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
        assert len(found) == len(keys) or isinstance(found[-1], NoRoom)
        if found[-1] == NoRoom(Status.NO_ROOM):
            self.refused.add(keys[len(found) - 1])
        data = bytes([length % 251]) * length
        written = []
        for begun in found:
            if isinstance(begun, Reservation):
                self.pool.view(begun.offset, begun.length)[:] = memoryview(data)
                written.append(Written(begun, xxhash.xxh3_128_digest(data)))
        published = self.pool.publish_all(written)
        stored = {entry.key: data for status, entry in published if status == Status.STORED}
        self.truth |= stored
        self.refused -= stored.keys()
        there = [begun for begun in found if not isinstance(begun, Reservation | NoRoom)]
        self.pool.unpin([entry for _status, entry in published] + there)

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
            lost = Cause.EVICTED if key in self.truth else Cause.COLD
            assert self.pool.missed(key, 1) == (Cause.QUOTA if key in self.refused else lost)

    @invariant()
    def holds(self) -> None:
        self.pool.check()
        for entry in self.pinned:
            assert self.pool.view(entry.offset, entry.length).tobytes() == self.truth[entry.key]

    def teardown(self) -> None:
        self.pool.close()


def test_a_pool_holds_what_it_says_whatever_is_asked_of_it():
    run_state_machine_as_test(StoreMachine, settings=settings(max_examples=40, stateful_step_count=40, deadline=None))


def new_pool(size: int = 1 << 18, eviction: str = "s3fifo") -> Pool:
    budget = Budget(size)
    budget.set_limits("t", 0, size)
    return open_pool("t", PoolOptions(budget, Geometry(1 << 17, SLAB), 0.25, eviction))


def put(pool: Pool, number: int, parent: bytes = b"", length: int = 8192) -> bytes:
    key = number.to_bytes(32, "big")
    begun = pool.begin(key, length)
    assert isinstance(begun, Reservation)
    pool.unpin([pool.publish(Written(begun, bytes(16), parent)).entry])
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


def put_batch(pool: Pool, numbers: range) -> list[Block]:
    """Stores blocks of 8 KiB in one batch, and leaves them pinned."""
    found = pool.begin_all(
        [number.to_bytes(32, "big") for number in numbers], [8192] * len(numbers), [False] * len(numbers)
    )
    return [entry for _status, entry in pool.publish_all([Written(each, bytes(16)) for each in found])]


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


def test_a_batch_of_a_full_pool_takes_the_memory_of_others_once():
    pool = new_pool(1 << 20)
    pool.unpin(put_batch(pool, range(128)))
    keys = [number.to_bytes(32, "big") for number in (*range(100, 128), *range(200, 210))]
    found = pool.begin_all(keys, [8192] * len(keys), [False] * len(keys))
    assert [isinstance(each, Reservation) for each in found] == [False] * 28 + [True] * 10
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


def put_copy(pool: Pool, number: int) -> bytes:
    """Stores a copy of an 8 KiB block whose home is another node; returns its key."""
    key = number.to_bytes(32, "big")
    begun = pool.begin(key, 8192, is_rcache=True)
    assert isinstance(begun, Reservation)
    pool.unpin([pool.publish(Written(begun, bytes(16))).entry])
    return key


def test_copies_beyond_their_share_of_the_quota_push_out_copies_alone():
    pool = new_pool()
    own = [put(pool, number) for number in range(4)]
    copies = [put_copy(pool, number) for number in range(100, 120)]
    assert pool.usage()["rcache_bytes"] == (1 << 18) // 4, "a quarter of the quota, in blocks of 8 KiB"
    assert pool.usage()["blocks"] == 4 + 8
    assert pool.missing(own) == []
    assert pool.missing(copies) == copies[:12]
    pool.check()
    pool.close()


def test_a_copy_finds_no_room_while_the_copies_of_its_share_are_read():
    pool = new_pool()
    copies = [put_copy(pool, number) for number in range(8)]
    own = [put(pool, number) for number in range(100, 124)]  # fills the rest of the pool, so that no memory is unused
    reading = pool.pin_prefix(copies)
    assert pool.begin(bytes(32), 8192, is_rcache=True) == reading[0]
    assert pool.begin(bytes([1] * 32), 8192, is_rcache=True) == NoRoom(Status.NO_ROOM)
    pool.unpin([*reading, reading[0]])
    assert pool.missing([*copies, *own]) == []
    pool.close()


def test_of_two_writers_of_one_key_the_first_to_publish_stays():
    """Both reserved memory before either published. Readers get the bytes of the first to publish, whole."""
    pool = new_pool()
    key = bytes(32)
    first, second = pool.begin(key, 8192), pool.begin(key, 8192)
    assert isinstance(first, Reservation)
    assert isinstance(second, Reservation)
    for begun, byte in ((first, b"1"), (second, b"2")):
        pool.view(begun.offset, begun.length)[:] = memoryview(byte * 8192)
    sums = [xxhash.xxh3_128_digest(byte * 8192) for byte in (b"1", b"2")]
    assert pool.publish(Written(second, sums[1])).status is Status.STORED
    status, entry = pool.publish(Written(first, sums[0]))
    assert status is Status.CONFLICT
    assert (entry.checksum, pool.view(entry.offset, entry.length).tobytes()) == (sums[1], b"2" * 8192)
    assert pool.usage()["used_bytes"] == 8192, "the other's memory is free again"
    pool.unpin([entry, entry])
    assert pool.pin_prefix([key]) == [entry]
    pool.check()
    pool.close()


def test_memory_whose_bytes_changed_is_not_used_again():
    pool = new_pool()
    (damaged,) = pool.pin_prefix([put(pool, 0)])  # its bytes do not match its checksum
    assert pool.distrust(damaged)
    pool.unpin([damaged])
    for number in range(40):
        put(pool, number)
    found = [entry for entry in pool.pin_each(pool.block_keys()) if entry is not None]
    assert len(found) == 31, "all other memory is in use"
    assert damaged.offset not in {entry.offset for entry in found}
    pool.check()
    pool.close()


def test_readers_and_writers_in_threads_keep_the_invariants():
    pool = new_pool()
    errors = []

    def churn(seed: int) -> None:
        try:
            for number in range(300):
                key = ((number * 7 + seed) % 60).to_bytes(32, "big")
                begun = pool.begin(key, 8192)
                if isinstance(begun, Reservation):
                    pool.unpin([pool.publish(Written(begun, bytes(16))).entry])
                elif not isinstance(begun, NoRoom):
                    pool.unpin([begun])
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
