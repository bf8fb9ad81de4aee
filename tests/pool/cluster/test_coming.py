"""A long load from another node: its first blocks are answered while the others arrive; nothing is kept at its end."""

import pytest

from ems.wire import messages as m
from ems.wire.messages import Cause
from kvloom.pool import reading
from kvloom.pool.reading import Reader
from tests.support.pool.agents import blocks_of
from tests.support.pool.node_pair import NUM_KEYS, SIZE, data_of, keep, keys_of, nodes
from tests.support.pool.node_tls import NodeFiles
from tests.support.waiting import soon, until

PART = 8  # the least number of blocks that are answered together
pytestmark = pytest.mark.usefixtures("either_kind")


@pytest.fixture(params=["plain", "tls"])
def pair(request, tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "_PART_BYTES", PART * SIZE)
    files = NodeFiles(tmp_path) if request.param == "tls" else None
    with nodes(*((files.config("a"), files.config("b")) if files else (None, None)), peer_connections=1) as made:
        yield made


@pytest.fixture
def reader(pair):
    """The reader of a session that has already loaded a block from the other node."""
    made = Reader(pair.here, pair.a.node)
    (first,) = keys_of("b", 1)
    keep(pair.there, first)
    found = made.load(m.Load(first), soon())
    assert (found.lengths, found.cause) == ([SIZE], Cause.NONE)
    made.release(m.Release(found.lease), soon())
    yield made
    made.close()


def kept(pair):
    """Stores NUM_KEYS blocks in the other node; returns their keys."""
    keys = keys_of("b")
    for key in keys:
        keep(pair.there, key)
    return keys


def take(pair, reader, keys):
    """The number of blocks answered for `keys`, and the cause; their bytes are compared and the lease is released."""
    found = reader.load(m.Load(b"".join(keys)), soon())
    for entry in (held := pair.here.pin_each(keys[: len(found.lengths)])):
        assert (pair.here.view(entry.offset, entry.length) == data_of(entry.key, SIZE)).all()
    pair.here.unpin(held)
    reader.release(m.Release(found.lease), soon())
    return len(found.lengths), found.cause


def is_let_go(pair):
    return not any(block.pins for block in blocks_of(pair.here)) and pair.rest() == 0


def test_what_has_come_is_answered_and_the_rest_follows(pair, reader):
    keys = kept(pair)
    pair.proxy.limit(60 * SIZE, is_cut=False)
    first, cause = take(pair, reader, keys)
    assert PART <= first <= 60
    assert cause is Cause.NO_ROOM
    pair.proxy.go_on()
    done = first
    while done < NUM_KEYS:
        count, cause = take(pair, reader, keys[done:])
        assert count >= min(PART, NUM_KEYS - done)
        done += count
    assert cause is Cause.NONE
    until(lambda: is_let_go(pair))
    assert pair.here.counts["load_hits"] == pair.here.counts["load_keys"] == NUM_KEYS + 1
    assert pair.there.counts["peer_reads"] == NUM_KEYS + 1, "each is asked for once"


@pytest.mark.parametrize("is_closed", [True, False], ids=["ends", "asks for other blocks"])
def test_a_session_that_does_not_want_the_rest_keeps_nothing(pair, reader, is_closed):
    keys = kept(pair)
    pair.proxy.limit(20 * SIZE, is_cut=False)
    assert take(pair, reader, keys)[0] < 20
    if is_closed:
        reader.close()
    else:
        assert take(pair, reader, keys[:5]) == (5, Cause.NONE), "they are here"
        reader._forget_coming()
    pair.proxy.go_on()
    until(lambda: is_let_go(pair))
    assert pair.there.counts["peer_reads"] < NUM_KEYS


def test_who_asks_for_other_blocks_behind_one_of_the_rest_is_brought_those(pair, reader):
    keys = kept(pair)
    pair.proxy.limit(20 * SIZE, is_cut=False)
    done, _ = take(pair, reader, keys[:100])
    pair.proxy.go_on()
    assert take(pair, reader, [keys[done], *keys[100:110]]) == (11, Cause.NONE)
    until(lambda: is_let_go(pair))


def test_a_hole_ends_it(pair, reader):
    keys = keys_of("b")
    for key in keys[:70] + keys[71:]:
        keep(pair.there, key)
    done, cause = 0, Cause.NO_ROOM
    while cause is Cause.NO_ROOM:
        count, cause = take(pair, reader, keys[done:])
        done += count
    assert (done, cause) == (70, Cause.COLD)
    until(lambda: is_let_go(pair))


def test_a_peer_that_dies_meanwhile_costs_what_has_not_come(pair, reader):
    keys = kept(pair)
    pair.proxy.limit(60 * SIZE, is_cut=True)
    done, cause = 0, Cause.NO_ROOM
    while cause is Cause.NO_ROOM:
        count, cause = take(pair, reader, keys[done:])
        done += count
    assert cause is Cause.PEER_DOWN
    assert PART <= done < 60
    until(lambda: is_let_go(pair))


def test_where_no_thread_can_be_had_the_load_is_answered_whole(pair, reader, monkeypatch):
    keys = kept(pair)

    def none(*_arguments):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(reading, "Coming", none)
    assert take(pair, reader, keys) == (NUM_KEYS, Cause.NONE)
