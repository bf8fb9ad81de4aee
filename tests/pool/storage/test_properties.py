"""Eviction, budget and homes under random calls, each followed by their own `check()`."""

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvloom.pool.cluster.placement import home
from kvloom.pool.storage.budget import PAGE_BYTES, Budget, RateLimit, Refusal
from kvloom.pool.storage.evict import Classes, Lru, Order, S3Fifo


class EvictMachine(RuleBasedStateMachine):
    """Every added key stays until it is removed; a victim is never a kept key, and exists if any key may be evicted."""

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

    @rule(key=st.binary(min_size=1, max_size=1), count=st.integers(1, 100))
    def miss(self, key: bytes, count: int) -> None:
        if key not in self.model:
            self.queue.missed(key, count)

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


@pytest.mark.parametrize("order", [Lru, S3Fifo])
def test_what_is_kept_is_no_victim_and_stays(order):
    queue = order()
    for key in (b"a", b"b"):
        queue.add(key)
    assert queue.victim(lambda key: key == b"a") == b"b"
    queue.remove(b"b")
    assert (len(queue), b"a" in queue, b"b" in queue) == (1, True, False)
    queue.check()


def test_a_key_that_was_used_stays_when_one_that_was_not_can_go():
    queue = S3Fifo()
    for key in (b"used", b"unused"):
        queue.add(key)
    queue.touch(b"used")
    assert queue.victim(lambda _key: False) == b"unused"


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


def test_a_key_that_comes_back_soon_after_it_went_outlives_those_that_are_new():
    queue = S3Fifo()
    for key in (b"a", b"b"):
        queue.add(key)
        queue.remove(key)
    for key in (b"new", b"b", b"newer"):
        queue.add(key)
    gone = []
    for _ in range(3):
        victim = queue.victim(lambda _key: False)
        queue.remove(victim)
        gone.append(victim)
    assert gone == [b"new", b"newer", b"b"]


def test_the_last_sixteen_keys_that_went_are_remembered():
    queue = S3Fifo()
    for n in range(17):
        queue.add(bytes([n]))
        queue.remove(bytes([n]))
    for n in (1, 0):
        queue.add(bytes([n]))
    assert queue.victim(lambda _key: False) == bytes([0]), "it is new again, and the other is not"


def test_a_key_that_had_its_time_in_the_main_queue_comes_back_as_a_new_one():
    queue = S3Fifo()
    for _ in range(2):
        queue.add(b"a")
        queue.remove(b"a")
    for key in (b"a", b"b"):
        queue.add(key)
    assert queue.victim(lambda _key: False) == b"a"


def gone_from(order: S3Fifo) -> list[bytes]:
    """Adds 100 keys that are evicted unused, and 4,000 that are used and stay; returns the first."""
    keys = [n.to_bytes(2, "big") for n in range(4100)]
    for key in keys:
        order.add(key)
    for key in keys[:100]:
        assert order.victim(lambda _key: False) == key
        order.remove(key)
    for key in keys[100:]:
        order.touch(key)
    return keys[:100]


def left_of(order: S3Fifo, news: int) -> int:
    """How many of `news` new keys are left after each addition evicted one key."""
    new = [b"new%d" % n for n in range(news)]
    for key in new:
        order.add(key)
        victim = order.victim(lambda _key: False)
        assert victim is not None
        order.remove(victim)
    return sum(key in order for key in new)


def test_new_keys_have_a_tenth_and_more_when_those_before_them_are_missed():
    order = S3Fifo()
    gone_from(order)
    assert 350 <= left_of(order, 2000) <= 450
    order = S3Fifo()
    for key in gone_from(order):
        order.missed(key, 64)
    assert left_of(order, 2000) == 2000


def test_new_keys_have_less_room_again_when_those_are_missed_that_were_used():
    order = S3Fifo()
    for key in gone_from(order):
        order.missed(key, 64)
    for key in (b"used%d" % n for n in range(20)):
        for _ in range(2):  # the second time, the key goes into the main queue
            order.add(key)
            order.remove(key)
        order.missed(key, 64)
    assert 350 <= left_of(order, 2000) <= 450


def test_a_key_is_missed_once():
    order = S3Fifo()
    (key, *_others) = gone_from(order)
    order.missed(key, 64)
    share = order._share
    for _ in range(3):
        order.missed(key, 64)
    order.add(key)
    assert order._share == share


def test_of_what_was_used_the_last_sixteen_that_went_are_remembered_too():
    order = S3Fifo()
    for key in gone_from(order):
        order.missed(key, 64)
    for victim in iter(lambda: order.victim(lambda _key: False), None):
        order.remove(victim)
    for n in range(17):
        for _ in range(2):
            order.add(b"used%d" % n)
            order.remove(b"used%d" % n)
    order.remove(b"nobody")
    share = order._share
    order.missed(b"used0", 64)
    assert order._share == share
    order.missed(b"used1", 64)
    assert order._share < share


def test_all_classes_hear_what_was_missed():
    classes = Classes(S3Fifo)
    orders = [classes.of(slot, is_copy) for slot in (4096, 8192) for is_copy in (False, True)]
    gone = [gone_from(order) for order in orders]
    classes.missed(gone[0][0], 64)
    assert len({order._share for order in orders}) == 1
    assert orders[0]._share > S3Fifo()._share


for machine in (EvictMachine, LruMachine):
    machine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


TestEvict = EvictMachine.TestCase
TestLru = LruMachine.TestCase


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


def test_guarantees_are_kept_for_their_tenants():
    page = PAGE_BYTES
    budget = Budget(100 * page)
    assert budget.set_limits("a", 40 * page, 80 * page)
    assert budget.set_limits("b", 0, 100 * page)
    assert not budget.set_limits("c", 70 * page, 70 * page)
    assert [budget.take("b", 25 * page) // page for _ in range(4)] == [25, 25, 10, 0]
    assert (budget.has_room("a"), budget.has_room("b")) == (True, False)
    assert [budget.take("a", 25 * page) // page for _ in range(3)] == [25, 15, 0]
    budget.check()


class BudgetMachine(RuleBasedStateMachine):
    """When tenants have given back what `excess` says, each can have its guarantee, and none is over its quota."""

    names = st.sampled_from("abcd")
    sizes = st.integers(0, 120).map(lambda n: n * PAGE_BYTES)

    def __init__(self) -> None:
        super().__init__()
        self.budget = Budget(100 * PAGE_BYTES)
        self.limits: dict[str, tuple[int, int]] = {}
        self.used: Counter[str] = Counter()

    @rule(name=names, guarantee=sizes, quota=sizes)
    def limit(self, name: str, guarantee: int, quota: int) -> None:
        others = sum(each for other, (each, _quota) in self.limits.items() if other != name)
        is_kept = self.budget.set_limits(name, guarantee, quota)
        assert is_kept == (guarantee <= quota and others + guarantee <= 100 * PAGE_BYTES)
        if is_kept:
            self.limits[name] = guarantee, quota
        for each, size in self.budget.excess().items():
            assert 0 < size <= self.used[each], "nobody gives what it has not"
            assert size % PAGE_BYTES == 0, "memory is given back as it was given out, in whole pages"
            self.used[each] -= size
            self.budget.give_back(each, size)
        assert self.budget.excess() == {}

    @precondition(lambda self: self.limits)
    @rule(data=st.data(), size=sizes)
    def take(self, data, size: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.limits)))
        guarantee, quota = self.limits[name]
        taken = self.budget.take(name, size)
        assert taken >= min(size, guarantee - self.used[name]), "what is guaranteed can be had at any time"
        self.used[name] += taken
        assert self.used[name] <= quota

    @invariant()
    def holds(self) -> None:
        self.budget.check()
        assert sum(self.used.values()) <= 100 * PAGE_BYTES


def test_what_tenants_give_back_in_proportion_is_whole_pages():
    page = PAGE_BYTES
    budget = Budget(100 * page)
    assert budget.set_limits("a", 0, 13 * page)
    assert budget.set_limits("c", 0, 72 * page)
    assert budget.take("a", 13 * page) == 13 * page
    assert budget.take("c", 72 * page) == 72 * page
    assert budget.set_limits("b", 16 * page, 16 * page)
    assert budget.excess() == {"a": page, "c": page}
    for name, size in budget.excess().items():
        budget.give_back(name, size)
    assert budget.set_limits("a", 13 * page, 13 * page)
    assert budget.take("a", page) == page, "its guarantee can be used to the last page"


BudgetMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestBudget = BudgetMachine.TestCase


def test_a_refusal_says_whether_the_tenant_or_the_node_is_full():
    budget = Budget(10 * PAGE_BYTES)
    assert (budget.knows("a"), budget.guarantee("a")) == (False, 0)
    assert budget.set_limits("a", 0, 6 * PAGE_BYTES)
    assert budget.set_limits("b", 5 * PAGE_BYTES, 9 * PAGE_BYTES)
    assert (budget.knows("a"), budget.quota("a"), budget.guarantee("b")) == (True, 6 * PAGE_BYTES, 5 * PAGE_BYTES)
    assert budget.take("a", 6 * PAGE_BYTES) == 5 * PAGE_BYTES, "what b is guaranteed stays free"
    assert budget.why_refused("a", PAGE_BYTES) is Refusal.NODE_FULL
    assert budget.why_refused("a", 2 * PAGE_BYTES) is Refusal.QUOTA


@pytest.mark.parametrize("new_order", [S3Fifo, Lru])
def test_copies_go_before_own_blocks_and_the_class_that_takes_most_before_others(new_order):
    classes = Classes(new_order)
    for is_copy, slot, count in ((False, 4096, 9), (False, 8192, 2), (True, 4096, 1), (True, 8192, 1)):
        for n in range(count):
            classes.of(slot, is_copy).add(bytes([is_copy, slot // 4096, n]))
    copies = [classes.of(8192, True), classes.of(4096, True)]
    assert classes.copies() == copies
    assert classes.every() == [*copies, classes.of(4096, False), classes.of(8192, False)]
    assert classes.of_slot(8192) == [classes.of(8192, True), classes.of(8192, False)]
    assert classes.of_slot(12288) == []
    classes.check()


def test_a_key_of_the_main_queue_goes_once_its_uses_are_used_up():
    queue = S3Fifo()
    for key in (b"a", b"b"):
        queue.add(key)
        queue.remove(key)
        queue.add(key)
    queue.touch(b"a")
    gone = []
    for _ in range(2):
        gone.append(queue.victim(lambda _key: False))
        queue.remove(gone[-1])
    assert gone == [b"b", b"a"]
    assert queue.victim(lambda _key: False) is None


def test_a_newcomer_is_given_time_to_be_used():
    queue = S3Fifo()
    known = [bytes([n]) for n in range(20)]
    for key in known:  # each comes back, and therefore goes into the main queue
        queue.add(key)
        queue.remove(key)
        queue.add(key)
    queue.add(b"new")
    assert queue.victim(lambda _key: False) == known[0]


def test_more_uses_than_three_do_not_keep_a_key_longer():
    queue = S3Fifo()
    for key, num_uses in ((b"often", 9), (b"thrice", 3)):
        queue.add(key)
        for _ in range(num_uses):
            queue.touch(key)
    assert queue.victim(lambda _key: False) == b"often", "the older of two that are used alike"


def test_a_rate_is_kept_on_average_and_no_size_waits_for_ever():
    limit = RateLimit(100)
    assert limit.take(150, 10.0), "one second's worth at once, the last overdraws"
    assert not limit.take(1, 10.4)
    assert limit.take(1000, 10.6)
    assert not limit.take(1, 20.4)
    assert limit.take(1, 20.6)
    assert [limit.take(60, 1000.0) for _ in range(3)] == [True, True, False]
