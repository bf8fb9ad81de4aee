"""Memory of tenants: it follows use when models change, and limits when guarantees and quotas change."""

from collections.abc import Iterable

import pytest

from ems.wire.messages import Status
from kvloom.pool.storage import headroom
from kvloom.pool.storage.allocator import slot_bytes
from kvloom.pool.storage.budget import Budget
from kvloom.pool.storage.entries import Geometry, NoRoom, Reservation, Written
from kvloom.pool.storage.opening import PoolOptions, open_pool
from kvloom.pool.storage.pool import Pool
from tests.pool.storage.test_store import SLAB, new_pool, put


@pytest.fixture(autouse=True, params=["1", "0"], ids=["native", "python"])
def _each_kind_of_pool(request, monkeypatch):
    monkeypatch.setenv("EMS_NATIVE", request.param)


def fill(pool: Pool, numbers: Iterable[int], length: int) -> list[bytes]:
    """Saves blocks of `length` bytes one by one as sessions do, making room ahead for the next; returns the keys."""
    keys = []
    for number in numbers:
        keys.append(put(pool, number, length=length))
        while pool.make_room_ahead(slot_bytes(length), 1):
            pass
    return keys


def share_of(pool: Pool, keys: list[bytes], length: int) -> float:
    """The fraction of the pool's memory that the blocks of `keys` occupy."""
    return (len(keys) - len(pool.missing(keys))) * length / pool.usage()["quota_bytes"]


@pytest.mark.parametrize("order", ["s3fifo", "lru"])
@pytest.mark.parametrize(("before", "after"), [(4096, 16384), (16384, 4096), (8192, SLAB)])
def test_after_a_change_of_model_memory_follows_use_within_one_pools_worth_of_saves(order, before, after):
    size = 32 * SLAB
    pool = new_pool(size, order)
    old = fill(pool, range(2 * size // before), before)
    assert share_of(pool, old, before) > 0.9
    pool.unpin(pool.pin_each(old[-3:]))
    new = fill(pool, range(10**6, 10**6 + size // after), after)
    assert share_of(pool, new, after) > 0.85
    assert pool.missing(old[: len(old) - size // before // 8]) == old[: len(old) - size // before // 8], "the old went"
    back = fill(pool, range(10**7, 10**7 + size // before), before)
    assert share_of(pool, back, before) > 0.85
    pool.check()
    pool.close()


@pytest.mark.parametrize("order", ["s3fifo", "lru"])
def test_two_models_share_memory_as_they_use_it(order):
    size = 32 * SLAB
    pool = new_pool(size, order)
    small, large = [], []
    for turn in range(3 * size // (4 * 16384)):  # 3 of 4 saved bytes belong to large blocks
        small += fill(pool, [turn * 4 + n for n in range(4)], 4096)
        large += fill(pool, [10**6 + turn * 3 + n for n in range(3)], 16384)
    assert 0.65 < share_of(pool, large, 16384) < 0.85
    assert 0.15 < share_of(pool, small, 4096) < 0.35
    pool.check()
    pool.close()


def test_a_model_that_is_still_read_keeps_its_memory_from_one_that_saves_once():
    size = 32 * SLAB
    pool = new_pool(size)
    hot = fill(pool, range(size // 2 // 8192), 8192)
    for number in range(10**6, 10**6 + 2 * size // 16384):
        fill(pool, [number], 16384)
        pool.unpin(pool.pin_prefix(hot))
    assert pool.missing(hot) == []
    pool.close()


def test_a_copy_takes_no_block_of_this_home_with_it():
    pool = new_pool()
    copy = pool.begin((1).to_bytes(32, "big"), 8192, True)
    assert isinstance(copy, Reservation)
    pool.unpin([pool.publish(Written(copy, bytes(16))).entry])
    homes = [put(pool, 2, parent=copy.key)]
    homes.append(put(pool, 3, parent=homes[-1]))
    for number in range(100, 120):
        more = pool.begin(number.to_bytes(32, "big"), 8192, True)
        assert isinstance(more, Reservation)
        pool.unpin([pool.publish(Written(more, bytes(16))).entry])
    assert pool.missing([copy.key, *homes]) == [copy.key]
    pool.check()
    pool.close()


def two_pools(total: int) -> tuple[Budget, Pool, Pool]:
    budget = Budget(total)
    pools = []
    for name in ("a", "b"):
        budget.set_limits(name, 0, total)
        pools.append(open_pool(name, PoolOptions(budget, Geometry(1 << 17, SLAB), 0.25, "s3fifo")))
    return budget, *pools


def settle(budget: Budget, *pools: Pool) -> None:
    over = budget.excess()
    for pool in pools:
        pool.shrink(over.get(pool.tenant, 0))


def test_a_guarantee_holds_at_once_and_takes_no_more_than_it_needs():
    budget, first, second = two_pools(1 << 20)
    fill(first, range(200), 8192)
    begun = second.begin(bytes(32), 8192)
    assert begun == NoRoom(Status.NO_ROOM)
    assert second.counts["refused_node_full"] == 1
    pinned = first.pin_each(first.block_keys()[:1])
    assert budget.set_limits("b", 400 << 10, 1 << 20)
    settle(budget, first, second)
    new = fill(second, range(50), 8192)
    assert second.missing(new) == []
    assert first.usage()["used_bytes"] >= (1 << 20) - (400 << 10) - (1 << 17), "whole segments go"
    assert first.view(pinned[0].offset, 8192).tobytes() is not None, "what is pinned stays readable"
    first.unpin(pinned)
    for pool in (first, second):
        pool.check()
        pool.close()


def test_memory_goes_back_when_a_quota_is_cut_or_all_is_evicted():
    budget, first, second = two_pools(1 << 20)
    fill(first, range(128), 8192)
    assert budget.set_limits("a", 0, 256 << 10)
    settle(budget, first)
    assert first.usage()["capacity_bytes"] <= 256 << 10
    assert len(fill(second, range(96), 8192)) == 96
    held = second.usage()["used_bytes"]
    assert second.evict(1 << 20) == held > 90 * 8192
    assert (second.usage()["capacity_bytes"], second.num_given_back) == (0, 6)
    assert budget.set_limits("a", 0, 1 << 20)
    keys = fill(first, range(200, 320), 8192)
    assert first.missing(keys) == []
    for pool in (first, second):
        pool.check()
        pool.close()


def test_five_guarantees_that_are_no_whole_slabs_are_all_kept():
    budget = Budget(256 << 12)
    pools = []
    for name in "abcde":
        assert budget.set_limits(name, 51 << 12, 256 << 12)
        pools.append(open_pool(name, PoolOptions(budget, Geometry(1 << 18, 1 << 16), 0.25, "s3fifo")))
    for pool in pools:
        keys = [put(pool, number, length=4096) for number in range(51)]
        assert pool.missing(keys) == []
        pool.check()
    for pool in pools:
        pool.close()


def test_a_guarantee_smaller_than_a_slab_is_kept():
    budget = Budget(1 << 20)
    assert budget.set_limits("t", 40 << 10, 40 << 10)
    pool = open_pool("t", PoolOptions(budget, Geometry(1 << 17, SLAB), 0.25, "s3fifo"))
    assert len([put(pool, number, length=8192) for number in range(20)]) == 20
    assert pool.usage()["used_bytes"] == 40 << 10
    assert pool.begin(bytes(32), 60000) == NoRoom(Status.NO_ROOM)
    assert pool.counts["refused_quota"] == 1
    pool.close()


def test_what_two_read_stays_until_both_have():
    pool = new_pool(1 << 17)
    (key,) = fill(pool, range(1), 8192)
    first, second = pool.pin_prefix([key]), pool.pin_each([key])
    pool.shrink(1)
    assert pool.missing([key]) == [key]
    pool.unpin(first)
    assert pool.num_given_back == 0, "the second reads"
    pool.unpin(second)
    assert pool.num_given_back == 1
    pool.check()
    pool.close()


def test_a_segment_that_leaves_waits_for_its_readers_and_writers():
    pool = new_pool(1 << 17)
    keys = fill(pool, range(8), 8192)
    (read,) = pool.pin_each(keys[-1:])
    begun = pool.begin((99).to_bytes(32, "big"), 8192)
    assert isinstance(begun, Reservation)
    assert pool.evict(1 << 20) > 0
    assert pool.missing([read.key]) == [], "what is being read is not evicted"
    pool.shrink(1)
    assert pool.missing([read.key]) == [read.key]
    assert pool.num_given_back == 0
    pool.view(read.offset, 8192)
    status, entry = pool.publish(Written(begun, bytes(16)))
    assert status == Status.NO_ROOM
    pool.unpin([entry])
    assert pool.num_given_back == 0
    pool.unpin([read])
    assert (pool.num_given_back, pool.usage()["capacity_bytes"], pool.segment_fd(0)) == (1, 0, None)
    assert pool.missing([put(pool, 50)]) == []
    assert pool.locate(pool.pin_each([(50).to_bytes(32, "big")])[0].offset)[0] == 1, "numbers are not used again"
    pool.close()


def test_a_pool_leaves_the_machine_its_last_memory_and_goes_on_with_what_it_has(monkeypatch, caplog):
    """Beyond its headroom it evicts its own blocks instead of taking memory, and grows once there is some again."""
    budget = Budget(8 * SLAB)
    budget.set_limits("t", 0, 8 * SLAB)
    pool = open_pool("t", PoolOptions(budget, Geometry(1 << 17, SLAB), 0.25, "s3fifo"))
    available = headroom.memory_bytes() // headroom.POOL_SHARE + 2 * SLAB

    def left() -> int:
        """Called when the budget has the next slab already."""
        return available - (budget._shares["t"].used - SLAB)

    monkeypatch.setattr(headroom, "available_bytes", left)
    pool.warm()
    assert pool.usage()["capacity_bytes"] == 2 * SLAB
    keys = fill(pool, range(32), 8192)
    assert pool.usage()["capacity_bytes"] == 2 * SLAB
    assert 0 < len(keys) - len(pool.missing(keys)) <= 16
    assert pool.missing(keys[-4:]) == []
    assert ["stay free" in record.getMessage() for record in caplog.records] == [True], "said once"
    available += 4 * SLAB
    monkeypatch.setattr(headroom, "_AGAIN_S", -1.0)
    monkeypatch.setattr(budget.headroom, "_refused_until_s", 0.0)
    fill(pool, range(100, 164), 8192)
    assert pool.usage()["capacity_bytes"] == 6 * SLAB
    pool.check()
    pool.close()
