"""States in EMS, over a real agent: which one of a prompt is found, with which blocks; what is lost, late or of another
layout is not there.
"""

from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest

from ems.values.pool import KvPool
from kvloom.contract.config import TierConfig
from kvloom.contract.messages import Moved, Transfer
from kvloom.contract.states import FoundState, KeptState, Search, chain_hash
from kvloom.rank.tier.ems import open_tier
from kvloom.rank.tier.kvmemory import KvMemory
from kvloom.rank.tier.statememory import StateMemory
from tests.server.serving.test_ems_tier import FACTORY, SHORT_S, TIMEOUT_S, move
from tests.support.pool.faults import AgentProcess
from tests.support.waiting import until

NUMBERS = count()
STATE_BYTES = (9 << 20) + 5  # three pieces, the last of which is short
SIZE = 4  # tokens a block
TOKENS = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
PARENTS = [b"root", b"one", b"two"]


class States:
    """A tier over four blocks and two places, whose contents a test knows."""

    def __init__(self, agent: AgentProcess, layout: str = "plain", timeout_s: float = TIMEOUT_S) -> None:
        self.kv = np.zeros((4, SIZE, 3), np.int64)
        self.places = np.zeros((2, STATE_BYTES), np.uint8)
        states = StateMemory(STATE_BYTES, self.kv[0].nbytes, self._read, self._write)
        sizes = 4, SIZE, self.kv[0].nbytes
        whole = KvMemory([[self.kv]], *sizes, lambda block: [self.kv[block].data], "m", layout, states=states)
        self.tier = open_tier(whole, TierConfig(FACTORY, timeout_s, {"socket": str(agent.socket)}))
        until(lambda: self.tier.is_up)

    def _parts(self, place: int, block: int) -> list[np.ndarray]:
        return [self.places[place], *([self.kv[block].reshape(-1).view(np.uint8)] if block >= 0 else [])]

    def _read(self, place: int, block: int) -> np.ndarray:
        return np.concatenate(self._parts(place, block))

    def _write(self, place: int, block: int, data: np.ndarray) -> None:
        first = 0
        for part in self._parts(place, block):
            part[:] = data[first : first + len(part)]
            first += len(part)

    def save(self, position: int) -> Moved:
        """The state behind so many of TOKENS, all of the same number; blocks have their numbers."""
        index, place = (position - 1) // SIZE, 0
        self.places[place], self.kv[:] = position, np.arange(1, 5)[:, None, None]
        key = chain_hash(PARENTS[index], TOKENS[index * SIZE : position])
        block = index if position % SIZE else -1
        self.tier.save(Transfer(next(NUMBERS), [], [], state=KeptState(place, block, key)))
        self.places[place] = 255  # the place has another owner as soon as the save has begun
        return self.moved()

    def moved(self) -> Moved:
        found: list[Moved] = []
        until(lambda: bool(found.extend(self.tier.poll()) or found))
        return found[0]

    def save_blocks(self, count: int) -> None:
        self.kv[:] = np.arange(1, 5)[:, None, None]
        wanted = Transfer(next(NUMBERS), list(range(count)), PARENTS[1 : count + 1])
        until(lambda: move(self.tier, wanted, is_load=False).num_blocks == count)

    def load(self, least: int = 1, num_known: int = 0) -> tuple[Moved, int]:
        """The report, and the number in the state that has come to the second place."""
        search, first = Search(least, num_known, 0, PARENTS, TOKENS), num_known
        transfer = Transfer(next(NUMBERS), list(range(first, 2)), PARENTS[first + 1 : 3], search)
        self.kv[:], self.places[:] = 0, 0
        moved = move(self.tier, transfer, is_load=True)
        if moved.position:
            self.tier.settle(FoundState(transfer.id, 1, 3 if moved.position % SIZE else -1))
            assert (self.kv[3] == ((moved.position - 1) // SIZE + 1 if moved.position % SIZE else 0)).all()
            assert len(set(self.places[1].tolist())) == 1
        assert (self.kv[moved.num_blocks + first : 3] == 0).all(), "a block beyond the state was written"
        return Moved(0, moved.num_blocks, moved.position), int(self.places[1][0])


@pytest.fixture
def small(tmp_path) -> Iterator[AgentProcess]:
    with AgentProcess(tmp_path / "ems.sock") as process:
        yield process


@pytest.fixture
def large(tmp_path) -> Iterator[AgentProcess]:
    with AgentProcess(tmp_path / "ems.sock", "--pool=256M", "--segment=32M", "--slab=16M") as process:
        yield process


def test_the_longest_state_is_found_behind_whose_blocks_the_pool_knows_and_comes_with_its_part_of_a_block(large):
    here = States(large)
    assert [here.save(position).num_blocks for position in (3, 4, 6, 10)] == [1] * 4
    assert here.load() == (Moved(0, 0, 3), 3), "the pool has none of the blocks"
    assert here.load(num_known=1) == (Moved(0, 0, 6), 6)
    assert here.load(num_known=2) == (Moved(0, 0, 10), 10)
    here.save_blocks(1)
    assert here.load() == (Moved(0, 1, 6), 6)
    assert here.load(least=7) == (Moved(0, 0, 0), 0)
    here.save_blocks(2)
    assert here.load() == (Moved(0, 2, 10), 10)
    here.tier.close()


def test_states_of_another_layout_are_not_there(large):
    here = States(large)
    here.save(3)
    here.tier.close()
    other = States(large, "another")
    assert other.load() == (Moved(0, 0, 0), 0)
    other.tier.close()
    again = States(large)
    assert again.load() == (Moved(0, 0, 3), 3), "after a restart it is"
    again.tier.close()


def test_a_pool_whose_slabs_are_too_small_is_told_once(small, caplog):
    here = States(small)
    assert [here.save(position).num_blocks for position in (3, 6)] == [0, 0]
    assert caplog.text.count("states are not saved") == 1
    assert here.tier.is_up
    here.tier.close()


def test_a_stopped_pool_costs_a_search_its_deadline(large):
    here = States(large, timeout_s=SHORT_S)
    here.save(3)
    with large.stopped():
        assert here.load() == (Moved(0, 0, 0), 0)
        assert not here.tier.is_up
    here.tier.close()


def test_of_a_state_whose_pieces_are_not_all_there_nothing_is_used(large, monkeypatch):
    here = States(large)
    here.save(3)
    here.save(6)
    get = KvPool.get

    def lossy(self, keys, targets, option):
        return [each and index != 1 for index, each in enumerate(get(self, keys, targets, option))]

    monkeypatch.setattr(KvPool, "get", lossy)
    assert here.load(num_known=1) == (Moved(0, 0, 0), 0)
    monkeypatch.undo()
    assert here.load(num_known=1) == (Moved(0, 0, 6), 6)
    here.tier.close()


def test_a_state_that_was_found_and_is_not_wanted_is_forgotten(large):
    here = States(large)
    here.save(3)
    search = Transfer(7, [], [], Search(1, 0, 0, PARENTS, TOKENS))
    assert move(here.tier, search, is_load=True).position == 3
    here.tier.settle(FoundState(7))
    here.tier.settle(FoundState(7))
    with pytest.raises(KeyError):
        here.tier.settle(FoundState(7, 1, 3))
    here.tier.close()
