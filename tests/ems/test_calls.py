"""Plain calls on an existing link are one step in C++; Python handles all other calls, and failures."""

import logging
import weakref
from itertools import count

import numpy as np
import pytest
import torch

from ems import CcKvOption, CcResult, EmsException, pipeline, transport
from ems.native.functions import functions
from kvloom.pool.storage.opening import prepare
from tests.support.pool.agents import copy_of, new_kv, running_agent, session, slots_of, tokens_of, two_agents, zero
from tests.support.waiting import WAIT_S, until

FIRST = 10**6
LARGE = [2**63, 2**64 - 1, 0]
SHAPES = {"list": list, "tuple": tuple, "array": np.array}


@pytest.fixture(scope="module", autouse=True)
def _has_a_compiler():
    if functions() is None:
        pytest.skip("there is no C++ compiler")
    prepare()  # compiles the agent's library too, before a call waits for it


class Background:
    """A session whose calls run asynchronously and are waited for."""

    def __init__(self, cc) -> None:
        self.exists = cc.exists
        self._cc = cc

    def save(self, *given) -> CcResult:
        return self._cc.async_save(*given).result()

    def load(self, *given) -> CcResult:
        return self._cc.async_load(*given).result()


@pytest.fixture(params=[lambda cc: cc, Background], ids=["at once", "in the background"])
def of(request):
    """The calls of a session, made directly or in the background."""
    return request.param


def connect(cc) -> None:
    """Gives the session a link with a staging area, and maps the pool's first segment."""
    cc.save(slots_of(63), [FIRST], [4])
    assert cc.load(slots_of(63), [FIRST], [4]) == CcResult(1, 1)


@pytest.fixture
def alone(cc, of, monkeypatch):
    """A session whose calls fail if Python carries them out."""
    connect(cc)
    monkeypatch.setattr(pipeline, "Transfer", None)
    monkeypatch.setattr("ems.context_caching.plan_hashes", None)
    return of(cc)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("hashes", [[1, 2, 3], [-5, 7, 2**63 - 1], LARGE], ids=["small", "signed", "large"])
def test_blocks_come_back_without_python(alone, kv, shape, hashes, monkeypatch):
    monkeypatch.setattr(transport, "_FLOOR_S", WAIT_S)  # of timeout=0: for the answer on a busy machine
    made, before = SHAPES[shape], copy_of(kv)
    if shape == "array" and hashes == LARGE:
        hashes = [1, 2, 2**62]  # unsigned arrays are left to Python
    given, counts = made(hashes), made([4, 4, 2])
    assert alone.save(made(slots_of(0, 1, 2)[:10]), given, counts) == CcResult(3, 3)
    assert alone.exists(given) == 2, "the last is a short block"
    zero(kv)
    option = CcKvOption(timeout=0)
    assert alone.load(made(slots_of(9, 5, 7)[:10]), given, counts, option) == CcResult(3, 3)
    assert torch.equal(tokens_of(kv, slots_of(9, 5, 7)[:10]), tokens_of(before, slots_of(0, 1, 2)[:10]))
    assert not tokens_of(kv, slots_of(0, 1, 2)).any()


def test_a_hole_ends_a_load_without_python(alone, kv):
    assert alone.save(slots_of(0), [1], [4]) == CcResult(1, 1)
    zero(kv)
    assert alone.load(slots_of(0, 1), [1, 2], [4, 4]) == CcResult(1, 2)
    assert (alone.exists([1, 2]), alone.exists([2]), alone.exists([])) == (1, 0, 0)
    assert not tokens_of(kv, slots_of(1)).any()


@pytest.mark.parametrize(
    ("slots", "hashes", "name"),
    [
        (slots_of(0, 0), [1, 2], "slot_mapping"),
        (slots_of(0, 64), [1, 2], "slot_mapping"),
        ([*slots_of(0, 1)[:-1], True], [1, True], "hashes"),
        (slots_of(0), [1, 2], "offsets"),
        (slots_of(0, 1), np.array([1.0, 2.0]), "hashes"),
    ],
)
def test_what_is_wrong_is_told_by_python_and_costs_no_link(cc, slots, hashes, name):
    connect(cc)
    link = cc._links._idle[0]
    for call in (cc.save, cc.load):
        with pytest.raises(EmsException, match=f"{name}: "):
            call(slots, hashes, [4, 4])
    assert cc._links._idle == [link]


@pytest.mark.parametrize("hashes", [[1, 2**63, -1], [2**70, -(2**80), 5], (np.int64(3), 2, 1)], ids=repr)
def test_hashes_of_any_size_are_python_s(cc, kv, hashes):
    connect(cc)
    before = copy_of(kv)
    assert cc.save(slots_of(0, 1, 2), hashes, [4, 4, 4]) == CcResult(3, 3)
    assert cc.exists(hashes) == 3
    assert cc.load(torch.tensor(slots_of(9, 5, 7)), hashes, [4, 4, 4]) == CcResult(3, 3)
    assert torch.equal(tokens_of(kv, slots_of(9, 5, 7)), tokens_of(before, slots_of(0, 1, 2)))


def test_an_agent_that_was_started_again_meanwhile_is_connected_to(of, kv, tmp_path):
    path = tmp_path / "ems.sock"
    with running_agent(socket=path) as first, session(path, kv) as cc:
        connect(cc)
        first.close()
        with running_agent(socket=path):
            assert of(cc).save(slots_of(0), [1], [4]) == CcResult(1, 1)
            assert of(cc).load(slots_of(0), [1], [4]) == CcResult(1, 1)
            assert cc.exists([1]) == 1


def test_an_agent_that_is_gone_is_an_error_and_nothing_exists(of, agent, cc):
    connect(cc)
    agent.close()
    for call in (of(cc).save, of(cc).load):
        with pytest.raises(EmsException, match="EMS_IO_ERROR"):
            call(slots_of(0), [1], [4])
    assert cc.exists([1]) == 0


def test_blocks_without_room_and_too_large_ones_are_told(of, caplog):
    caplog.set_level(logging.WARNING)
    kv = new_kv(num_blocks=200, layers=8, heads=4, dim=64)  # 32 KiB per block
    with running_agent(pool_bytes=1 << 20) as agent, session(agent.config.socket, kv) as cc:
        connect(cc)
        assert of(cc).save(slots_of(*range(100)), list(range(100)), [4] * 100) == CcResult(32, 100)
        assert "/metrics count such blocks" in caplog.text
        assert of(cc).load(slots_of(*range(100, 132)), list(range(32)), [4] * 32) == CcResult(32, 32)
    kv = new_kv(num_blocks=64, dim=8192)
    with running_agent() as agent, session(agent.config.socket, kv) as cc:
        of(cc).save([0], [-1], [1])
        assert of(cc).load([0], [-1], [1]) == CcResult(1, 1)
        assert of(cc).save(slots_of(0), [1], [4]) == CcResult(0, 1)
        assert "--slab" in caplog.text


def test_what_is_on_this_node_only_is_counted(of, kv):
    with two_agents() as (a, b), session(a.config.socket, kv) as cc:
        connect(cc)
        b.close()
        option, others = CcKvOption(timeout=1000), count(100)
        until(lambda: of(cc).save(slots_of(0), [next(others)], [4], option).local)  # the node knows that it is alone
        found = [of(cc).save(slots_of(i), [i], [4], option) for i in range(20)]
        assert {result.success for result in found} == {1}
        assert 0 < sum(result.local for result in found) < 20


def test_segments_that_are_mapped_anew_are_read_where_they_are_then(of, agent, cc, kv):
    connect(cc)
    before = copy_of(kv)
    assert of(cc).save(slots_of(0), [1], [4]) == CcResult(1, 1)
    link = cc._links._idle[0]
    link.keep_up(1000)  # as if the pool had given back as many segments
    assert of(cc).load(slots_of(9), [1], [4]) == CcResult(1, 1)
    assert torch.equal(tokens_of(kv, slots_of(9)), tokens_of(before, slots_of(0)))


def test_a_call_that_is_over_holds_no_segment(cc):
    connect(cc)
    link = cc._links._idle[0]
    assert cc.load(slots_of(63), [FIRST], [4]) == CcResult(1, 1), "of what is mapped"
    memory = weakref.ref(link.mapped.memories[0])
    link.keep_up(1000)
    assert memory() is None


def test_another_cache_is_read_and_written_from_then_on(of, cc, kv):
    connect(cc)
    other = new_kv(seed=1)
    before = copy_of(other)
    cc.register_kvcache(other)
    assert of(cc).save(slots_of(0), [5], [4]) == CcResult(1, 1)
    assert of(cc).save(slots_of(1), [6], [4]) == CcResult(1, 1)
    zero(other)
    assert of(cc).load(slots_of(2, 3), [5, 6], [4, 4]) == CcResult(2, 2)
    assert torch.equal(tokens_of(other, slots_of(2, 3)), tokens_of(before, slots_of(0, 1)))
