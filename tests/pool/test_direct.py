"""Direct sessions reserve memory, write to it and commit; what they do not commit is freed, however they end."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
import xxhash

from ems import CcResult
from ems.common.maps import SegmentMaps
from ems.transport import Link
from ems.wire import messages as m
from ems.wire.messages import Status
from kvloom.pool.answering import answers
from kvloom.pool.storage.native.pool import NativePool
from kvloom.pool.writing import Writer
from tests.support.pool.agents import copy_of, new_kv, running_agent, session, slots_of, tokens_of
from tests.support.waiting import soon, until

SIZE = 4096
STORED, DUPLICATE, NO_ROOM = bytes([Status.STORED]), bytes([Status.DUPLICATE]), bytes([Status.NO_ROOM])


@pytest.fixture
def agent(either_kind):
    """An agent with 1 MiB, of one slab, in C++ and in Python."""
    with running_agent(is_direct=True, pool_bytes=1 << 20, segment_bytes=1 << 20, slab_bytes=1 << 20) as running:
        yield running
        running.node.pool("default").check()


@contextlib.contextmanager
def linked(agent) -> Iterator[Link]:
    with contextlib.closing(Link(agent.config.socket, "", "", SegmentMaps(), soon())) as link:
        link.call(m.Ping(), soon())  # Python answers a session's first request
        yield link


def keys_of(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(32, "big") for number in numbers)


def half_a_sum() -> m.Commit:
    message = m.Commit(b"")
    message.sums = bytes(m.SUM_BYTES // 2)  # which its own check would refuse
    return message


def reserve(link: Link, *numbers: int, size: int = SIZE) -> m.Reserved:
    answer = link.call(m.Reserve(keys_of(*numbers), [size] * len(numbers)), soon())
    assert isinstance(answer, m.Reserved)
    return answer


def write(link: Link, *numbers: int) -> bytes:
    """Saves blocks whose bytes are their numbers. Returns the statuses of the commit."""
    reserved, sums = reserve(link, *numbers), b""
    for number, segment, offset in zip(numbers, reserved.segments, reserved.offsets, strict=True):
        block = bytes([number]) * SIZE
        memoryview(link.segment(segment, soon()))[offset : offset + SIZE] = block
        sums += xxhash.xxh3_128_digest(block)
    answer = link.call(m.Commit(sums), soon())
    assert isinstance(answer, m.Saved)
    return answer.statuses


def found(link: Link, *numbers: int) -> list[bytes]:
    """The bytes of the longest prefix that is there, checked by their sums."""
    answer = link.call(m.Load(keys_of(*numbers)), soon())
    assert isinstance(answer, m.Found)
    blocks = [
        bytes(memoryview(link.segment(segment, soon()))[offset : offset + length])
        for segment, offset, length in zip(answer.segments, answer.offsets, answer.lengths, strict=True)
    ]
    assert b"".join(map(xxhash.xxh3_128_digest, blocks)) == answer.sums
    link.begin(m.Release(answer.lease), soon())
    return blocks


def used(agent) -> int:
    return agent.node.pool("default").usage()["used_bytes"]


def test_what_is_committed_is_found_and_not_asked_for_again(agent):
    with linked(agent) as link:
        assert write(link, 1, 2, 3) == 3 * STORED
        assert reserve(link, 1, 2, 3, 4).statuses == 3 * DUPLICATE + STORED
    with linked(agent) as link:
        assert found(link, 1, 2, 3, 4) == [bytes([number]) * SIZE for number in (1, 2, 3)]
    until(lambda: used(agent) == 3 * SIZE)


def test_a_reservation_ends_with_the_next_one_and_with_the_session(agent):
    with linked(agent) as link:
        for number in range(3):
            assert reserve(link, number).statuses == STORED
            assert used(agent) == SIZE
        assert link.call(m.Commit(b""), soon()) == m.Saved(b"")
        assert used(agent) == 0, "without a checksum it is freed"
        reserve(link, 9)
    until(lambda: used(agent) == 0)
    with linked(agent) as link:
        assert found(link, 9) == []


def test_a_commit_without_a_reservation_publishes_nothing(agent):
    with linked(agent) as link:
        assert link.call(m.Commit(bytes(m.SUM_BYTES)), soon()) == m.Saved(b"")
        assert write(link, 1) == STORED
        assert link.call(m.Commit(bytes(m.SUM_BYTES)), soon()) == m.Saved(b"")
        assert found(link, 1) == [bytes([1]) * SIZE]


def test_more_sums_than_reservations_are_ignored(agent):
    with linked(agent) as link:
        reserved = reserve(link, 7)
        memoryview(link.segment(reserved.segments[0], soon()))[reserved.offsets[0] :][:SIZE] = bytes(SIZE)
        sums = xxhash.xxh3_128_digest(bytes(SIZE)) + bytes(m.SUM_BYTES)
        assert link.call(m.Commit(sums), soon()) == m.Saved(STORED)
        assert found(link, 7) == [bytes(SIZE)]


def test_keys_behind_one_without_room_are_not_tried(agent):
    with linked(agent) as link, linked(agent) as other:
        assert reserve(link, *range(4), size=1 << 18).statuses == 4 * STORED
        assert reserve(other, 5, 6, size=1 << 18).statuses == 2 * NO_ROOM
        link.call(m.Commit(b""), soon())
        assert reserve(other, *range(5, 10), size=1 << 18).statuses == 4 * STORED + NO_ROOM
    until(lambda: used(agent) == 0)


def test_of_two_who_reserve_a_key_the_first_to_commit_is_read(agent):
    with linked(agent) as link, linked(agent) as other:
        assert reserve(other, 1).statuses == STORED
        assert write(link, 1) == STORED
        assert link.call(m.Ping(), soon()) == m.Done()
        answer = other.call(m.Commit(bytes(m.SUM_BYTES)), soon())
        assert answer == m.Saved(bytes([Status.CONFLICT]))
        assert found(other, 1) == [bytes([1]) * SIZE]
    until(lambda: used(agent) == SIZE)


@pytest.mark.parametrize(
    "wrong",
    [
        half_a_sum,
        lambda: m.Reserve(keys_of(1), [m.MAX_BLOCK_BYTES]),
        lambda: m.Reserve(keys_of(1), [(1 << 20) + 1]),
    ],
    ids=["half a sum", "the largest block", "more than a slab"],
)
def test_what_cannot_be_leaves_nothing(agent, wrong):
    with linked(agent) as link:
        reserve(link, 3)
        with contextlib.suppress(OSError):
            link.call(wrong(), soon())
    until(lambda: used(agent) == 0)
    with linked(agent) as link:
        assert write(link, 1) == STORED


@pytest.mark.parametrize("is_native", [True, False])
def test_a_direct_node_is_written_without_staging(is_native, monkeypatch):
    kv = new_kv()
    if not is_native:
        monkeypatch.setattr(Link, "_native", lambda link: None)
    monkeypatch.setattr(Link, "arena", None)
    with running_agent(is_direct=True) as agent, session(agent.config.socket, kv) as cc:
        before = copy_of(kv)
        assert cc.save(slots_of(*range(20)), list(range(20)), [4] * 20) == CcResult(20, 20)
        assert cc.save(slots_of(*range(20)), list(range(20)), [4] * 20) == CcResult(20, 20)
        assert cc.load(slots_of(*range(30, 50)), list(range(20)), [4] * 20) == CcResult(20, 20)
        assert torch.equal(tokens_of(kv, slots_of(*range(30, 50))), tokens_of(before, slots_of(*range(20))))
        agent.node.pool("default").check()


@pytest.mark.parametrize("is_native", [True, False])
def test_a_direct_save_of_more_than_the_pool_ends_where_room_does(is_native, monkeypatch):
    """Blocks that were there before are kept in their places, in any mixture with new ones."""
    kv = new_kv()
    if not is_native:
        monkeypatch.setattr(Link, "_native", lambda link: None)
    small = {"pool_bytes": 1 << 16, "segment_bytes": 1 << 16, "slab_bytes": 1 << 16}
    with running_agent(is_direct=True, **small) as agent, session(agent.config.socket, kv) as cc:
        before = copy_of(kv)
        assert cc.save(slots_of(1), [1], [4]) == CcResult(1, 1)
        assert cc.save(slots_of(3), [3], [4]) == CcResult(1, 1)
        numbers = list(range(60))
        saved = cc.save(slots_of(*numbers), numbers, [4] * 60)
        assert 4 < saved.success < 60
        assert saved.total == 60
        assert cc.exists(numbers) == saved.success
        kv_slots = slots_of(*numbers[: saved.success])
        for layer in kv:
            for tensor in layer:
                tensor.zero_()
        assert cc.load(slots_of(*numbers), numbers, [4] * 60).success == saved.success
        assert torch.equal(tokens_of(kv, kv_slots), tokens_of(before, kv_slots))
        agent.node.pool("default").check()


@pytest.mark.parametrize("is_native", [True, False])
def test_who_only_saves_unmaps_what_was_given_back(is_native, either_kind, monkeypatch):
    """Its memory is free when no process maps it."""
    kv = new_kv()
    if not is_native:
        monkeypatch.setattr(Link, "_native", lambda link: None)
    with running_agent(is_direct=True) as agent, session(agent.config.socket, kv) as cc:
        pool = agent.node.pool("default")
        for turn in range(3):
            hashes = list(range(20 * turn, 20 * turn + 20))
            assert cc.save(slots_of(*range(20)), hashes, [4] * 20) == CcResult(20, 20)
            assert list(cc._links._maps._maps) == [turn], "segments have numbers of their own"
            until(lambda: pool.evict(1 << 30) > 0)
            pool.shrink(1 << 30)
        pool.check()


@pytest.mark.parametrize("is_native", [True, False])
def test_what_a_commit_refuses_is_not_reported_as_saved(is_native, monkeypatch):
    """As where the memory is being given back."""
    kv = new_kv()
    if not is_native:
        monkeypatch.setattr(Link, "_native", lambda link: None)
    refused = m.Saved(STORED + NO_ROOM + STORED)
    monkeypatch.setenv("EMS_NATIVE", "1" if is_native else "0")
    monkeypatch.setattr(Writer, "commit", answers(m.Commit)(lambda *_: refused))
    monkeypatch.setattr(NativePool, "serving", lambda pool, channel, terms: None)
    with running_agent(is_direct=True) as agent, session(agent.config.socket, kv) as cc:
        assert cc.save(slots_of(0, 1, 2), [1, 2, 3], [4] * 3) == CcResult(1, 3)
