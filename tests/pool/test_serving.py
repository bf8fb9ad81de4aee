"""A session's requests get the same answers from C++ and from Python."""

import ctypes
import socket
import time
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ems import EmsException
from ems.common.channel import Channel
from ems.native.functions import Segment
from ems.native.line import Mapped, WantedLoad, native_line
from ems.native.tensors import native_tensors
from ems.runs import Blocks, address_of
from ems.tensors import as_tensor
from ems.transport import Link, SegmentMaps
from ems.wire import messages as m
from ems.wire.frames import FrameReader, FrameWriter, WireError
from kvloom.pool.agent import Agent
from kvloom.pool.node import Fetched, Outgoing, Route
from kvloom.pool.storage.budget import RateLimit
from kvloom.pool.storage.entries import Block
from kvloom.pool.storage.pool import Pool, Terms
from kvloom.pool.storage.segments import SharedMemory
from tests.support.pool.agents import running_agent
from tests.support.waiting import soon, until

pytestmark = pytest.mark.usefixtures("native")
ARENA, LENGTHS = 1 << 16, [100, 4096, 9000]
numbers = st.integers(0, 30)
some_keys = st.lists(numbers, max_size=6).map(lambda chosen: b"".join(bytes([n]) * 32 for n in chosen))
saves = st.builds(
    lambda keys, length, parent, flags: m.Save(
        keys,
        [length * i for i in range(len(keys) // 32)],
        [length] * (len(keys) // 32),
        parent,
        *flags,
    ),
    some_keys,
    st.sampled_from(LENGTHS),
    st.just(b"") | numbers.map(lambda n: bytes([n]) * 32),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
outside = st.sampled_from([(ARENA - 9, 10), (2**62, 10), (0, ARENA + 1)]).map(
    lambda area: m.Save(bytes(32), [area[0]], [area[1]])
)
asked = st.one_of(*(st.builds(kind, some_keys, st.booleans()) for kind in (m.Load, m.Exists, m.Pick, m.Has)))
releases = st.builds(lambda which, corrupt: (which, corrupt), st.integers(0, 5), st.integers(-1, 6))
requests = st.lists(saves | asked | releases | st.just(m.Ping()) | outside, min_size=1, max_size=12)


def link_to(agent: Agent) -> Link:
    return Link(agent.config.socket, "", "", SegmentMaps(), soon())


class Kind:
    """An agent that serves its sessions in one way, a link to it, and the contents of its staging area."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.link = link_to(agent)
        self.link.arena(ARENA, 0, soon())[:] = np.arange(ARENA, dtype=np.uint8)
        self.leases: list[int] = []

    def ask(self, request: m.Message | tuple[int, int]) -> object:
        """The answer without what may differ: the locations of blocks and the numbers of leases."""
        deadline_s = soon()
        if isinstance(request, tuple):
            which, corrupt = request
            lease = self.leases.pop(which % len(self.leases)) if self.leases else 12345
            self.link.begin(m.Release(lease, corrupt), deadline_s)
            request = m.Ping()
        try:
            answer = self.link.call(request, deadline_s)
        except EmsException as refusal:
            return str(refusal)
        if isinstance(answer, m.Found):
            self.leases += [answer.lease] if answer.lease else []
            return answer.lease > 0, answer.lengths, answer.sums, answer.cause, answer.num_given_back
        return answer


@pytest.fixture(scope="module")
def kinds() -> Iterator[list[Kind]]:
    with pytest.MonkeyPatch.context() as patch, running_agent() as python, running_agent() as native:
        patch.setenv("EMS_NATIVE", "0")
        made = [Kind(python)]
        patch.delenv("EMS_NATIVE")
        made.append(Kind(native))
        yield made
        for kind in made:
            kind.link.close()


@given(asked=requests)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_answers_and_counts_are_the_same(kinds, asked):
    pools = [kind.agent.node.pools()[0] for kind in kinds]
    before = [Counter(pool.counts) for pool in pools]
    for request in asked:
        python, native = (kind.ask(request) for kind in kinds)
        assert python == native
    assert type(pools[0]) is not type(pools[1])
    python, native = (Counter(pool.counts) - old for pool, old in zip(pools, before, strict=True))
    assert python == native


class Elsewhere:
    """Other nodes that decide by a key's first byte, and remember what they are sent. They have nothing to give."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes | str | int, ...]] = []

    def route(self, key: bytes) -> Route:
        return Route(key[0] % len(Route))

    def push_later(self, pool: Pool, entry: Block, parent: bytes, _deadline_s: float) -> bool:
        self.sent.append((entry.key, entry.checksum, entry.length, entry.pins, parent))
        is_taken = entry.key[0] % 4 > 1
        entry.is_home = is_taken
        pool.unpin([entry])
        return is_taken

    def push_now(self, tenant: str, block: Outgoing, _deadline_s: float) -> bool:
        self.sent.append((tenant, block.key, block.data.tobytes(), block.checksum, block.parent))
        return block.key[0] % 4 > 1

    def fetch(self, _pool: Pool, _keys: list[bytes], *_how: object, **_more: object) -> Fetched:
        return Fetched(m.Cause.NONE, [])

    def has(self, _tenant: str, keys: list[bytes], _deadline_s: float) -> list[bool]:
        return [False] * len(keys)


class Seldom(RateLimit):
    """A rate that refuses each seventh time it is asked, whatever the time."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def take(self, size: int, _now_s: float) -> bool:
        self.asked.append(size)
        return len(self.asked) % 7 > 0


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Kind]]:
    """The same with other nodes and a rate limit."""
    with pytest.MonkeyPatch.context() as patch, running_agent(put_rate=1) as a, running_agent(put_rate=1) as b:
        for agent in (a, b):
            agent.node.others = Elsewhere()
            agent.node._put_limits["default"] = Seldom()
        patch.setenv("EMS_NATIVE", "0")
        made = [Kind(a)]
        patch.delenv("EMS_NATIVE")
        made.append(Kind(b))
        yield made
        for kind in made:
            kind.link.close()


@given(asked=requests)
@example(asked=[m.Save(b"".join(bytes([n]) * 32 for n in range(200)), [0] * 200, [100] * 200)])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_saves_send_the_same_blocks_to_other_nodes(nodes, asked):
    pools = [kind.agent.node.pools()[0] for kind in nodes]
    before = [Counter(pool.counts) for pool in pools]
    sent = [kind.agent.node.others.sent for kind in nodes]
    limits = [kind.agent.node.put_limit("default").asked for kind in nodes]
    for request in asked:
        python, native = (kind.ask(request) for kind in nodes)
        assert python == native
        assert sent[0] == sent[1]
        assert limits[0] == limits[1]
    assert type(pools[0]) is not type(pools[1])
    python, native = (Counter(pool.counts) - old for pool, old in zip(pools, before, strict=True))
    assert python == native
    assert pools[0].usage() == pools[1].usage()


@given(asked=requests, cuts=st.sets(st.integers(1, 4000)))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_requests_that_come_in_pieces_and_all_at_once_are_answered_in_order(kinds, asked, cuts):
    known = [request for request in asked if isinstance(request, m.Load | m.Exists | m.Has | m.Pick | m.Ping)]
    writer, channel = FrameWriter(), kinds[1].link.channel
    data = b"".join(writer.encode(request, number) for number, request in enumerate(known))
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(data)], strict=True):
        channel.send_bytes(memoryview(data[start:end]), None)
    for number, request in enumerate(known):
        frame = channel.receive(soon())
        assert frame.request_id == number
        if isinstance(frame.message, m.Found) and frame.message.lease:
            kinds[1].leases.append(frame.message.lease)
        assert isinstance(
            frame.message, {m.Ping: m.Done, m.Exists: m.Count, m.Has: m.Present}.get(type(request), m.Found)
        )


def test_a_damaged_block_is_looked_at_once_more_and_forgotten(kinds):
    for kind in kinds:
        pool = kind.agent.node.pools()[0]
        (key,) = m.split_keys(b"d" * 32)
        assert kind.ask(m.Save(key, [0], [5000])) == m.Saved(bytes([m.Status.STORED]))
        kind.ask(m.Load(key))
        kind.ask((len(kind.leases) - 1, 0))
        assert pool.counts["corrupt"] == 0
        kind.ask(m.Load(key))
        (block,) = pool.pin_prefix([key])
        pool.view(block.offset, block.length)[17] ^= 1
        kind.ask((len(kind.leases) - 1, 0))
        assert pool.counts["corrupt"] == 1
        assert kind.ask(m.Exists(key)) == m.Count(0)
        pool.unpin([block])


@pytest.mark.parametrize("is_spoiled", [True, False])
def test_what_is_no_frame_ends_the_session_and_a_request_with_the_handshake_is_answered(kinds, is_spoiled):
    for kind in kinds:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(str(kind.agent.config.socket))
        channel, writer = Channel(sock), FrameWriter()
        channel.send(m.Hello("", bytes(32)))
        channel.receive(soon())
        exists = writer.encode(m.Exists(b"n" * 32), 7)
        last = exists[:-1] + bytes([exists[-1] ^ 1]) if is_spoiled else exists
        channel.send_bytes(memoryview(writer.encode(m.Proof(bytes(32))) + exists + last), None)
        assert isinstance(channel.receive(soon()).message, m.Welcome)
        assert channel.receive(soon()).message == m.Count(0)
        if is_spoiled:
            with pytest.raises(ConnectionResetError):
                channel.receive(soon())
        else:
            assert channel.receive(soon()).message == m.Count(0)
        channel.close()


def test_an_answer_that_is_none_is_told(kinds):
    """The SDK's calls in C++ raise the same errors as those in Python."""
    here, there = socket.socketpair()
    line = native_line(here.fileno())
    assert line is not None
    link = kinds[1].link
    line, link._line = link._line, line
    try:
        for answer, said in ((m.Done(), "another answer than Done"), (m.Count(2), "another answer than Count")):
            channel = Channel(there)
            channel.send(answer)
            with pytest.raises(WireError, match=said):
                link.exists(bytes(32), False, soon())
        Channel(there).send(m.Failure(3, "not today"))
        with pytest.raises(EmsException, match="not today"):
            link.exists(bytes(32), False, soon())
        with pytest.raises(TimeoutError):
            link.exists(bytes(32), False, time.monotonic() + 0.01)
        there.close()
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            link.exists(bytes(32), False, soon())
    finally:
        link._line = line
        here.close()


@given(keys=some_keys, is_local=st.booleans())
def test_frames_of_the_library_are_those_of_python(keys, is_local):
    here, there = socket.socketpair()
    with here, there:
        line = native_line(here.fileno())
        assert line is not None
        there.sendall(FrameWriter().encode(m.Count(0)))
        line.exists(keys, is_local, soon())
        if keys:
            reader = FrameReader()
            reader.feed(there.recv(1 << 16))
            frame = reader.next_frame()
            assert frame is not None
            assert frame.message == m.Exists(keys, is_local)


@pytest.mark.parametrize("is_chain", [True, False])
def test_a_batch_is_a_chain_if_it_says_so_and_is_pinned_until_it_was_answered(kinds, is_chain):
    keys = [bytes([200 + is_chain, n]) * 16 for n in range(2)]
    for kind in kinds:
        pool = kind.agent.node.pools()[0]
        kind.ask(m.Save(b"".join(keys), [0, 100], [100, 100], b"", is_chain=is_chain))
        found = pool.pin_prefix(keys)
        assert [block.parent_key for block in found] == [b"", keys[0] if is_chain else b""]
        until(lambda found=found: [block.pins for block in found] == [1, 1])
        pool.unpin(found)


def a_part(number: int, is_last: bool) -> m.Save:
    """A message of a batch that uses a quarter of the staging area."""
    size = ARENA // 4
    return m.Save(bytes([220, number]) * 16, [number % 4 * size], [size], b"", is_last=is_last)


@pytest.mark.parametrize(("ends", "answers"), [((False, True), [[0, 1]]), ((False, False), [[0], [1]])])
def test_who_has_sent_the_end_of_a_batch_gets_the_last_answers_at_once(kinds, ends, answers):
    """Otherwise the client might wait for a part of its staging area. Each packet is what the agent sent at once."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    arena, terms, writer = SharedMemory("test", ARENA, False), Terms(ctypes.c_uint64(0)), FrameWriter()
    with here, there:
        serving = kinds[1].agent.node.pools()[0].serving(Channel(there), terms)
        serving.use_arena(arena)
        here.send(b"".join(writer.encode(a_part(n, is_last), n) for n, is_last in enumerate(ends)))
        here.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionResetError):
            serving.receive()
        for expected in answers:
            reader = FrameReader()
            reader.feed(here.recv(1 << 16))
            assert [frame.request_id for frame in iter(reader.next_frame, None)] == expected
        serving.close()
    arena.close()


def test_a_block_outside_of_its_segment_is_not_read():
    here, there = socket.socketpair()
    with here, there:
        line = native_line(here.fileno())
        assert line is not None
        memory = np.zeros(100, np.uint8)
        mapped = Mapped((Segment * 1)(Segment(0, address_of(memory), len(memory))), [memory], 0)
        tensor = as_tensor("t", np.zeros((1, 1, 1, 8), np.uint8))
        assert tensor is not None
        tensors = native_tensors([tensor], [0])
        assert tensors is not None
        plan = tensors.plan_of(Blocks.of([(((0, 0, 1),),)]), bytes(32), np.array([8]))
        wanted = WantedLoad(plan, 0, 1, False)
        for segment, offset, length in ((0, 93, 8), (0, -1, 8), (0, 0, 101), (0, 2**62, 8)):
            Channel(there).send(dishonest(segment, offset, length))
            with pytest.raises(IndexError):
                line.load(wanted, lambda _numbers, _count: mapped, soon())


@pytest.mark.parametrize("size", [16 << 10, 48 << 10], ids=["one-thread", "two-threads"])
@pytest.mark.parametrize("damaged", [None, 0, 1, 2, 30, 63])
def test_a_load_is_copied_up_to_the_first_damaged_block(damaged, size):
    """Blocks behind a damaged one stay as they were, even if a second thread has checked them already."""
    here, there = socket.socketpair()
    num = 64
    source = np.random.default_rng(1).integers(0, 256, (num, size), np.uint8)
    mapped = Mapped((Segment * 1)(Segment(0, address_of(source), source.size)), [source.reshape(-1)], 0)
    tensor = as_tensor("t", np.zeros((num, 1, 1, size), np.uint8))
    tensors = native_tensors([tensor], [0]) if tensor is not None else None
    assert tensors is not None
    plan = tensors.plan_of(Blocks.of([(((i, 0, 1),),) for i in range(num)]), bytes(32 * num), np.full(num, size))
    sums = [xxhash.xxh3_128_digest(block.data) for block in source]
    if damaged is not None:
        sums[damaged] = bytes(16)
    offsets = [i * size for i in range(num)]
    found = m.Found(0, [0] * num, offsets, [size] * num, b"".join(sums), m.Cause.NONE, 0)
    with here, there:
        line = native_line(here.fileno())
        assert line is not None
        for _ in range(20):
            tensor.data[:] = 0
            Channel(there).send(found)
            done = line.load(WantedLoad(plan, 0, num, False), lambda _numbers, _count: mapped, soon())
            assert (done.num_done, done.is_damaged) == (num if damaged is None else damaged, damaged is not None)
            copied = tensor.data.reshape(num, size)
            assert (copied[: done.num_done] == source[: done.num_done]).all()
            assert not copied[done.num_done :].any()


def dishonest(segment: int, offset: int, length: int) -> m.Found:
    """A reply that an honest agent would not send."""
    found = m.Found(1, [segment], [0], [8], bytes(16), 0)
    found.offsets, found.lengths = [offset], [length]
    return found
