"""The allocator of slots: which slots a slab takes, when it serves another size, and random calls."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvloom.pool.storage.allocator import SlabAllocator, slot_bytes

SLAB = 1 << 16


class AllocatorMachine(RuleBasedStateMachine):
    """Slots never overlap, in any order of sizes and frees, while slabs come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = SlabAllocator(SLAB)
        self.live: dict[int, int] = {}
        self.closed: set[int] = set()

    @initialize(size=st.integers(1, 16))
    def begin(self, size: int) -> None:
        for _ in range(3):
            self.allocator.grow(SLAB)
        self.allocator.grow(size * 4096)

    @rule(length=st.integers(1, SLAB), count=st.integers(1, 20))
    def allocate(self, length: int, count: int) -> None:
        room = self.allocator.room(slot_bytes(length))
        offsets = self.allocator.allocate(slot_bytes(length), count)
        assert len(offsets) <= count
        assert bool(offsets) == (room > 0)
        for offset in offsets:
            index = offset // SLAB
            assert index not in self.closed
            assert offset + length <= index * SLAB + self.allocator.size(index)
            assert all(offset + length <= o or o + n <= offset for o, n in self.live.items())
            self.live[offset] = length

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data) -> None:
        offset = data.draw(st.sampled_from(sorted(self.live)))
        self.allocator.free(offset)
        del self.live[offset]

    @rule(share=st.integers(1, 16))
    def grow(self, share: int) -> None:
        missing = self.allocator.num_missing
        self.allocator.grow(min(missing, share * 4096) or share * 4096)

    @rule(data=st.data())
    def close(self, data) -> None:
        index = data.draw(st.integers(0, self.allocator.num_slabs - 1))
        size = self.allocator.size(index)
        assert self.allocator.close(index) == (0 if index in self.closed else size)
        self.closed.add(index)

    @invariant()
    def holds(self) -> None:
        self.allocator.check()
        sizes = [slot_bytes(n) for offset, n in self.live.items() if offset // SLAB not in self.closed]
        assert self.allocator.used_bytes == sum(sizes)


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_a_slab_serves_one_size_at_a_time_and_another_once_it_is_empty():
    allocator = SlabAllocator(SLAB)
    allocator.grow(SLAB)
    offsets = allocator.allocate(4096, 20)
    assert offsets == [n * 4096 for n in range(16)]
    assert (allocator.allocate(4096), allocator.allocate(8192), allocator.room(8192)) == ([], [], 0)
    allocator.free(offsets[3])
    allocator.free(offsets[5])
    assert allocator.room(4096) == 2 * 4096
    assert sorted(allocator.allocate(4096, 9)) == [offsets[3], offsets[5]]
    for offset in offsets:
        allocator.free(offset)
    allocator.check()
    assert allocator.allocate(8192, 2) == [0, 8192]
    assert allocator.allocate(2 * SLAB) == [], "no slab is so large"


def test_a_last_slab_that_is_short_is_filled_up_while_it_is_used():
    allocator = SlabAllocator(SLAB)
    allocator.grow(2048)
    assert allocator.room(4096) == 0
    allocator.grow(2048)
    assert (allocator.room(4096), allocator.num_missing) == (4096, SLAB - 4096)
    assert allocator.allocate(4096, 9) == [0]
    allocator.grow(8192)
    assert allocator.allocate(4096, 1) == [4096]
    allocator.grow(4096)
    assert allocator.allocate(4096, 9) == [8192, 12288]
    allocator.grow(2048)
    assert allocator.allocate(4096) == [], "half a slot more is none"
    allocator.check()


def test_what_is_held_of_a_closed_slab_is_given_back_and_not_handed_out_again():
    allocator = SlabAllocator(SLAB)
    for _ in range(3):
        allocator.grow(SLAB)
    held = allocator.allocate(4096, 2)
    slab = allocator.slab_of(held[0])
    assert (allocator.close(slab), allocator.close(slab)) == (SLAB, 0)
    (other,) = allocator.allocate(4096)
    assert allocator.slab_of(other) != slab
    for offset in held:
        allocator.free(offset)
    empty = next(index for index in range(3) if index not in (slab, allocator.slab_of(other)))
    assert allocator.close(empty) == SLAB
    assert (allocator.used_bytes, allocator.capacity) == (4096, SLAB)
    allocator.check()


def test_a_slab_that_is_closed_is_nobodys_and_keeps_its_number():
    allocator = SlabAllocator(SLAB)
    allocator.grow(SLAB)
    allocator.skip()
    allocator.grow(SLAB)
    assert (allocator.num_slabs, allocator.is_closed(1), allocator.size(1), allocator.close(1)) == (3, True, 0, 0)
    (offset,) = allocator.allocate(SLAB // 2, 1)
    slab = allocator.slab_of(offset)
    assert (allocator.slot(slab), allocator.count(slab), allocator.class_bytes(SLAB // 2)) == (SLAB // 2, 1, SLAB)
    assert allocator.room(SLAB // 2) == SLAB // 2 + SLAB, "the rest of its slab, and the free one"
    assert allocator.close(slab) == SLAB
    assert (allocator.used_bytes, allocator.capacity, allocator.class_bytes(SLAB // 2)) == (0, SLAB, 0)
    allocator.free(offset)
    allocator.check()
    (other,) = allocator.allocate(SLAB // 2, 1)
    assert allocator.slab_of(other) not in (slab, 1)


@pytest.mark.parametrize("length", [1, 4096, 4097, 65536, 1 << 20, (1 << 20) + 1])
def test_a_size_class_wastes_at_most_an_eighth(length):
    assert length <= slot_bytes(length) <= max(4096, length * 9 // 8 + 512)
