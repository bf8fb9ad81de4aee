"""Batches of blocks between nodes: a block is published only if its checksum is right, whatever the others are."""

import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import xxhash

from ems.common.breaker import Breaker
from ems.common.channel import Channel
from ems.keys import KEY_BYTES
from ems.wire import messages as m
from ems.wire.frames import WireError
from ems.wire.messages import Cause, Status
from kvloom.pool.agent import Agent
from kvloom.pool.cluster import fetching
from kvloom.pool.cluster.fetching import Fetch, Wanted
from kvloom.pool.cluster.peer_line import Own, PeerLine, ask
from kvloom.pool.cluster.secured import Complaints
from kvloom.pool.config import Address
from kvloom.pool.storage.entries import NoRoom, Reservation
from kvloom.pool.storage.seals import sealed
from tests.support.pool.agents import SECRET, blocks_of, running_agent
from tests.support.pool.node_pair import NUM_KEYS, SIZE, Pair, data_of, keep, keys_of, nodes
from tests.support.pool.node_proxy import tcp_pair
from tests.support.pool.node_tls import NodeFiles
from tests.support.waiting import WAIT_S, soon, until

pytestmark = pytest.mark.usefixtures("either_kind")


@pytest.fixture(params=["plain", "tls"])
def pair(request, tmp_path) -> Iterator[Pair]:
    files = NodeFiles(tmp_path) if request.param == "tls" else None
    with nodes(*((files.config("a"), files.config("b")) if files else (None, None))) as made:
        yield made


def test_a_batch_comes_whole_and_in_few_messages(pair):
    keys = keys_of("b")
    for key in keys:
        keep(pair.there, key)
    problem, came = pair.fetch(keys, soon())
    assert problem is Cause.NONE
    assert sorted(came) == sorted(keys)
    assert pair.there.counts["peer_reads"] == NUM_KEYS
    again = pair.fetch(keys, soon())
    assert (again[0], sorted(again[1])) == (Cause.NONE, sorted(keys)), "they are here, and asked for all the same"


@pytest.mark.parametrize("number", [0, 1, 70, NUM_KEYS - 1])
def test_a_block_whose_sum_is_wrong_is_nobodys_and_costs_no_other(pair, number):
    keys = keys_of("b")
    for key in keys:
        keep(pair.there, key)
    (bad,) = pair.there.pin_each([keys[number]])
    pair.there.view(bad.offset, SIZE)[SIZE // 2] ^= 8
    pair.there.unpin([bad])
    problem, came = pair.fetch(keys, soon())
    assert problem is Cause.CORRUPT
    assert sorted(came) == sorted(key for key in keys if key != keys[number])
    assert pair.here.counts["corrupt_on_wire"] == 1
    assert pair.here.missing(keys) == [keys[number]]
    assert pair.rest() == 0


@pytest.mark.parametrize("is_cut", [True, False], ids=["dies", "stalls"])
@pytest.mark.parametrize("num_bytes", [40, 900, 20_000, 16 * SIZE + 3000, 60 * SIZE])
def test_a_peer_that_dies_or_stalls_in_mid_batch_costs_what_has_not_come(pair, num_bytes, is_cut):
    keys = keys_of("b")
    for key in keys:
        keep(pair.there, key)
    pair.proxy.limit(num_bytes, is_cut)
    problem, came = pair.fetch(keys, soon() if is_cut else time.monotonic() + 0.5)
    assert problem is (Cause.PEER_DOWN if is_cut else Cause.TIMEOUT)
    assert len(came) <= num_bytes // SIZE
    assert sorted(pair.here.missing(keys)) == sorted(set(keys) - set(came))
    assert pair.rest() == 0, "what had been reserved for the others is free"
    pair.proxy.go_on()
    pair.a.peers._links["b"].breaker.succeed()
    assert sorted(pair.fetch(pair.here.missing(keys), soon())[1]) == sorted(set(keys) - set(came))


@pytest.mark.parametrize(("hole", "asked"), [(0, 48), (20, 112), (100, NUM_KEYS)])
def test_what_lies_behind_a_hole_is_not_brought_but_for_what_was_asked_already(hole, asked, monkeypatch):
    monkeypatch.setattr(fetching, "_TURN_S", WAIT_S)  # otherwise nothing would be requested ahead on a busy machine
    with nodes() as pair:
        keys = keys_of("b")
        for key in keys[:hole] + keys[hole + 1 :]:
            keep(pair.there, key)
        problem, came = pair.fetch(keys, soon())
        assert problem is Cause.NONE
        assert came == [key for key in keys[:asked] if key != keys[hole]]
        again = pair.fetch(pair.here.missing(keys), soon(), has_end=False)[1]
        assert again == [key for key in keys[asked:] if key != keys[hole]], "who asks for each gets each"


def test_blocks_without_room_are_read_past_and_end_the_load():
    with nodes(pool_bytes=1 << 20) as pair:
        keys, held = keys_of("b"), []
        for key in keys:
            keep(pair.there, key)
        while isinstance(begun := pair.here.begin(secrets.token_bytes(KEY_BYTES), SIZE), Reservation):
            held.append(begun)
        assert isinstance(begun, NoRoom)
        for reservation in held[:10]:
            pair.here.abandon(reservation)
        problem, came = pair.fetch(keys, soon())
        assert problem is Cause.NO_ROOM
        assert came == keys[:10]
        assert pair.there.counts["peer_reads"] < NUM_KEYS
        for reservation in held[10:]:
            pair.here.abandon(reservation)
        assert sorted(pair.fetch(keys, soon(), has_end=False)[1]) == sorted(keys), "the connection is in step"


@contextmanager
def answering(answer: m.PeerBlocks, tail: bytes, is_closed: bool = False) -> Iterator[Channel]:
    """A channel to a node that gives any request this answer, and then sends the bytes `tail`."""
    near, far = tcp_pair()

    def reply() -> None:
        channel = Channel(far)
        channel.receive(soon())
        channel.send(answer, soon())
        channel.send_bytes(memoryview(tail), soon())
        if is_closed:
            far.shutdown(socket.SHUT_RDWR)

    thread = threading.Thread(target=reply)
    thread.start()
    with near, far:
        yield Channel(near)
        thread.join()


def keys_in(fetch: Fetch) -> list[bytes]:
    return [entry.key for held in fetch.held for entry in held.blocks()]


def truth(key: bytes, size: int = SIZE) -> tuple[bytes, bytes]:
    data = data_of(key, size).tobytes()
    return xxhash.xxh3_128_digest(data), data


def blocks(keys: list[bytes], sizes: list[int], sums: Sequence[bytes]) -> m.PeerBlocks:
    """The answer that announces these blocks."""
    packed = b"".join(sums)
    return m.PeerBlocks(sizes, packed, sealed(b"".join(keys), packed))


def put(keys: list[bytes], sizes: list[int], sums: Sequence[bytes]) -> m.PeerPut:
    """The message that pushes these blocks."""
    packed = b"".join(sums)
    return m.PeerPut("default", b"".join(keys), sizes, packed, seals=sealed(b"".join(keys), packed))


def test_good_blocks_under_each_others_keys_are_nobodys():
    with running_agent() as agent:
        pool, keys = agent.node.pool("default"), keys_of("b", 3)
        sums, data = zip(*map(truth, keys), strict=True)
        others = keys[1], keys[0], keys[2]  # the other node mistakes the first two for each other
        fetch = Fetch(pool, keys, Wanted(keys, has_end=True))
        with answering(blocks(list(others), [SIZE] * 3, sums), b"".join(data)) as channel:
            assert fetch.run(channel, soon()) is Cause.CORRUPT
        assert keys_in(fetch) == [keys[2]]
        assert pool.counts["corrupt_on_wire"] == 2
        pool.check()


def test_an_earlier_version_that_seals_nothing_is_told_apart_and_not_believed(called):
    agent, line = called
    keys = keys_of("b", 1)
    (summed, data) = truth(keys[0])
    fetch = Fetch(agent.node.pool("default"), keys, Wanted(keys, has_end=True))
    with answering(m.PeerBlocks([SIZE], summed), data) as to, pytest.raises(WireError, match="an earlier version"):
        fetch.run(to, soon())

    def push(channel: Channel) -> Cause:
        channel.send(m.PeerPut("default", keys[0], [SIZE], summed), soon())
        channel.send_bytes(memoryview(data), soon())
        with pytest.raises(ConnectionError):
            channel.receive(soon())
        return Cause.NONE

    assert line.call(soon(), push) is Cause.NONE
    assert agent.node.pool("default").usage()["blocks"] == 0


@pytest.mark.parametrize("num_sent", [0, 1, SIZE - 1, SIZE, 2 * SIZE + 17, 5 * SIZE - 1])
def test_of_an_answer_that_ends_too_early_nothing_is_kept(num_sent):
    with running_agent() as agent:
        pool, keys = agent.node.pool("default"), keys_of("b", 5)
        fetch = Fetch(pool, keys, Wanted(keys, has_end=True))
        sums, data = zip(*map(truth, keys), strict=True)
        announced, tail = blocks(keys, [SIZE] * 5, sums), b"".join(data)[:num_sent]
        with answering(announced, tail, is_closed=True) as to, pytest.raises(ConnectionResetError):
            fetch.run(to, soon())
        with answering(announced, tail) as to, pytest.raises(TimeoutError):
            fetch.run(to, time.monotonic() + 0.1)
        assert keys_in(fetch) == []
        assert pool.usage()["used_bytes"] == 0
        with answering(announced, b"".join(data)) as channel:
            assert fetch.run(channel, soon()) is Cause.NONE, "the part is taken up again on a new connection"
        assert keys_in(fetch) == keys
        pool.check()


def test_a_block_that_fits_into_no_pool_is_read_past():
    with running_agent() as agent:
        pool, keys = agent.node.pool("default"), keys_of("b", 3)
        sizes = [SIZE, 4 * pool.geometry.slab_bytes, SIZE]
        sums, data = zip(*map(truth, keys, sizes), strict=True)
        fetch = Fetch(pool, keys, Wanted(keys, has_end=True))
        with answering(blocks(keys, sizes, sums), b"".join(data)) as channel:
            assert fetch.run(channel, soon()) is Cause.NO_ROOM
        assert keys_in(fetch) == [keys[0], keys[2]]
        assert pool.counts["refused_too_large"] == 1


@pytest.mark.parametrize("num_lengths", [0, 2, 4])
def test_an_answer_of_other_than_was_asked_ends_the_connection(num_lengths):
    with running_agent() as agent:
        pool, keys = agent.node.pool("default"), keys_of("b", 3)
        fetch = Fetch(pool, keys, Wanted(keys, has_end=True))
        announced = m.PeerBlocks([SIZE] * num_lengths, bytes(16 * num_lengths))
        with answering(announced, b"") as to, pytest.raises(WireError, match="expected blocks"):
            fetch.run(to, soon())
        assert pool.usage()["used_bytes"] == 0


@pytest.fixture
def called() -> Iterator[tuple[Agent, PeerLine]]:
    """A node, and a line of another node that calls it."""
    with running_agent(node_id="b", listen=("127.0.0.1", 0), secret=SECRET) as agent:
        address = Address("b", "127.0.0.1", agent.peer_port)
        line = PeerLine(address, Own("a", SECRET), Breaker(), Complaints())
        yield agent, line
        line.close()


def test_each_block_that_is_pushed_has_a_status_of_its_own(called):
    agent, line = called
    pool, keys = agent.node.pool("default"), keys_of("b", 100)
    sizes = [SIZE] * 100
    sizes[60] = 2 * pool.geometry.slab_bytes
    sums, data = (list(each) for each in zip(*map(truth, keys, sizes), strict=True))
    sums[40] = sums[41]
    keep(pool, keys[50])
    keys[70] = keys[69]  # other bytes under a key that is taken
    sent, answers = put(keys, sizes, sums), []

    def push(channel: Channel) -> Cause:
        channel.send(sent, soon(), deadline_ms=20_000)
        channel.send_bytes(memoryview(b"".join(data)), soon())
        answers.append(channel.receive(soon()).message)
        return Cause.NONE

    assert line.call(soon(), push) is Cause.NONE
    expected = [Status.STORED] * 100
    expected[40], expected[50], expected[60] = Status.NO_ROOM, Status.DUPLICATE, Status.TOO_LARGE
    expected[70] = Status.CONFLICT
    assert list(answers[0].statuses) == expected
    assert pool.counts["peer_writes"] == expected.count(Status.STORED)
    assert pool.counts["corrupt_on_wire"] == 1
    for block in blocks_of(pool):
        assert (pool.view(block.offset, block.length) == data_of(block.key)).all()
    pool.check()


@pytest.mark.parametrize("num_sent", [0, 100, SIZE, 70 * SIZE + 9])
def test_a_push_that_breaks_off_leaves_whole_blocks_and_no_memory_taken(called, num_sent):
    agent, line = called
    pool, keys = agent.node.pool("default"), keys_of("b", 100)
    sums, data = zip(*map(truth, keys), strict=True)

    def push(channel: Channel) -> Cause:
        channel.send(put(keys, [SIZE] * 100, sums), soon(), deadline_ms=20_000)
        channel.send_bytes(memoryview(b"".join(data))[:num_sent], soon())
        channel.abort()
        return Cause.NONE

    assert line.call(soon(), push) is Cause.NONE
    until(lambda: agent.node.counts["peer_sessions_ended"] == 1)
    blocks = blocks_of(pool)
    assert len(blocks) == (64 if num_sent > 64 * SIZE else 0)
    assert pool.usage()["used_bytes"] == sum(block.slot for block in blocks)
    for block in blocks:
        assert (pool.view(block.offset, block.length) == data_of(block.key)).all()
    pool.check()


def test_a_long_load_lets_others_have_the_connection_in_between(monkeypatch):
    monkeypatch.setattr(fetching, "_TURN_S", 0.0)
    turns, call = [], PeerLine.call

    def counted(line: PeerLine, *arguments: Any) -> Cause:
        turns.append(line)
        return call(line, *arguments)

    monkeypatch.setattr(PeerLine, "call", counted)
    with nodes() as pair:
        keys = keys_of("b")
        for key in keys:
            keep(pair.there, key)
        assert pair.fetch(keys, soon()) == (Cause.NONE, keys)
    assert len(turns) == 4, "parts of 16, 32 and 64 keys, and the rest"


def test_one_fault_of_several_connections_is_one_failure_of_the_peer(called):
    agent, _line = called
    address, breaker, both = Address("b", "127.0.0.1", agent.peer_port), Breaker(), threading.Barrier(2)
    lines = [PeerLine(address, Own("a", SECRET), breaker, Complaints()) for _ in range(2)]

    def fail(_channel: Channel) -> Cause:
        both.wait(WAIT_S)
        raise ConnectionResetError("the peer died")

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda line: line.call(soon(), fail), lines)) == [Cause.PEER_DOWN] * 2
    assert breaker.failures == 1


def test_an_answer_in_part_is_a_sign_of_life(called):
    """So calls with little time keep nobody else from a node."""
    agent, _line = called
    breaker = Breaker(patience_s=WAIT_S)
    line = PeerLine(Address("b", "127.0.0.1", agent.peer_port), Own("a", SECRET), breaker, Complaints())

    def is_late(channel: Channel) -> Cause:
        ask(channel, m.PeerGet("t", bytes(KEY_BYTES), has_only=True), soon())
        raise TimeoutError("more was to come")

    assert [line.call(soon(), is_late) for _ in range(4)] == [Cause.TIMEOUT] * 4
    assert (breaker.failures, breaker.waited_s) == (0, 0.0)
    assert line.call(soon(), lambda _channel: Cause.NONE) is Cause.NONE
    line.close()
