"""Blocks on three nodes, with an oracle of what each node holds: other nodes find what `save` reports."""

import threading
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from ems import CcKvOption, CcResult
from ems.wire import messages as m
from kvloom.pool.agent import Agent
from kvloom.pool.cluster.arrivals import receive_blocks
from kvloom.pool.cluster.peer_session import PeerSession
from kvloom.pool.cluster.placement import home
from kvloom.pool.config import Address, TenantLimits
from kvloom.pool.storage.passing import Announced
from tests.support.pool.agents import BLOCK_SIZE, SECRET, blocks_of, has_pushed, running_agent, session, slots_of
from tests.support.waiting import soon, until

BLOCK_BYTES = 8 << 10
NUM_BLOCKS = 1024
LONG = CcKvOption(timeout=60_000)


class Engine:
    """An engine on a node. The bytes of a block follow from its hash."""

    def __init__(self, stack: ExitStack, agent: Agent) -> None:
        self.agent = agent
        tensor = torch.zeros((NUM_BLOCKS, BLOCK_SIZE, 1, BLOCK_BYTES // BLOCK_SIZE), dtype=torch.uint8)
        self._rows = tensor.view(NUM_BLOCKS, BLOCK_BYTES).numpy()
        self.cc = stack.enter_context(session(agent.config.socket, [[tensor]]))

    def save(self, hashes: list[int], option: CcKvOption = LONG):
        for row, block_hash in enumerate(hashes):
            self._rows[row] = np.random.default_rng(block_hash).integers(0, 256, BLOCK_BYTES, np.uint8)
        return self.cc.save(slots_of(*range(len(hashes))), hashes, [BLOCK_SIZE] * len(hashes), option)

    def load(self, hashes: list[int], option: CcKvOption = LONG) -> int:
        self._rows[:] = 0
        count = self.cc.load(slots_of(*range(len(hashes))), hashes, [BLOCK_SIZE] * len(hashes), option).success
        for row, block_hash in enumerate(hashes[:count]):
            truth = np.random.default_rng(block_hash).integers(0, 256, BLOCK_BYTES, np.uint8)
            assert (self._rows[row] == truth).all(), f"wrong bytes for {block_hash}"
        return count

    @property
    def pool(self):
        return self.agent.node.pool("default")


def have_pushed(engines: list[Engine]) -> bool:
    return has_pushed(*(engine.agent for engine in engines))


@pytest.fixture
def engines():
    with ExitStack() as stack:
        agents = [
            stack.enter_context(
                running_agent(
                    pool_bytes=16 << 20,
                    segment_bytes=1 << 20,
                    node_id=f"n{i}",
                    listen=("127.0.0.1", 0),
                    secret=SECRET,
                    peers=(Address("x", "127.0.0.1", 1),),
                )
            )
            for i in range(3)
        ]
        addresses = [Address(a.config.node_id, "127.0.0.1", a.peer_port) for a in agents]
        for agent in agents:
            agent.peers.set_members(addresses)
        yield [Engine(stack, agent) for agent in agents]


def hold_up_pushes(engine: Engine, until_set: threading.Event, monkeypatch) -> None:
    for link in engine.agent.peers._links.values():
        go = link._saves._try

        def held_up(call, deadline_s, go=go):
            until_set.wait()
            return go(call, soon())

        monkeypatch.setattr(link._saves, "_try", held_up)


def answer_unknown(peer: PeerSession, message: m.PeerPut, deadline_s: float) -> None:
    """Answer a node's blocks with statuses that no version of the protocol has."""
    blocks = Announced(m.split_keys(message.keys), message.lengths, message.sums, message.parents)
    for _statuses, got, _lengths in receive_blocks(peer._channel, peer._node.pool("other"), blocks, deadline_s):
        got.release()
    told = type("Raw", (), {"OP": m.Saved.OP})()
    told.statuses = b"\x63" * len(message.lengths)
    peer._channel.send(told, deadline_s)


def held(engines: list[Engine], keys: list[bytes]) -> list[set[bytes]]:
    """Which of `keys` each node holds."""
    return [set(keys) - set(engine.pool.missing(keys)) for engine in engines]


def test_a_node_whose_answer_is_none_gets_the_next_blocks_when_it_answers(engines, monkeypatch):
    hashes = list(range(64))
    with monkeypatch.context() as patched:
        patched.setattr(PeerSession, "_put", answer_unknown)
        assert engines[0].save(hashes).success == 64
        until(lambda: have_pushed(engines))
        assert engines[0].pool.counts["push_done"] == 0 < engines[0].pool.counts["push_failed"]
    until(lambda: engines[0].save(hashes) == CcResult(64, 64) and have_pushed(engines))
    engines[0].pool.evict(1 << 40)
    assert engines[1].load(hashes) > 0


def test_all_that_was_saved_is_found_from_every_node(engines):
    hashes = list(range(NUM_BLOCKS))
    result = engines[0].save(hashes)
    assert (result.success, result.local) == (NUM_BLOCKS, 0)
    cache = engines[0].cc._planning_cache(engines[0].cc._key_space[0])
    keys = m.split_keys(cache.names(hashes))

    def is_home() -> bool:
        nodes = held(engines, keys)
        return all(key in nodes[int(home(key, ["n0", "n1", "n2"])[1])] for key in keys)

    until(is_home)
    for engine in engines:
        assert engine.load(hashes) == NUM_BLOCKS
    assert is_home(), "what a load brought pushed nothing out of its home"
    for engine in engines:
        for start in (5, 300, 900):
            assert engine.load(hashes[start : start + 100]) == 100
        engine.pool.check()
        assert all(entry.pins <= 1 for entry in blocks_of(engine.pool))


def test_a_batch_larger_than_the_nodes_pool_is_saved_where_its_homes_have_room(either_kind, engines):
    writer, reader = engines[0], engines[1]
    writer.agent.node.set_limits(TenantLimits("default", 0, NUM_BLOCKS // 2 * BLOCK_BYTES))
    result = writer.save(list(range(NUM_BLOCKS)))
    assert (result.success, result.local) == (NUM_BLOCKS, 0)
    until(lambda: have_pushed(engines))
    assert reader.load(list(range(NUM_BLOCKS))) == NUM_BLOCKS
    assert writer.pool.usage()["used_bytes"] <= NUM_BLOCKS // 2 * BLOCK_BYTES
    assert [name for name in writer.pool.counts if name.startswith("refused_")] == [], "what waited was not refused"
    writer.pool.check()


def test_batch_loads_find_what_is_there_while_others_push_copies_out(engines):
    hashes = list(range(600))
    assert engines[0].save(hashes).local == 0
    until(lambda: have_pushed(engines))
    wrong: list[int] = []

    def read(engine: Engine, seed: int) -> None:
        chance = np.random.default_rng(seed)
        for _ in range(15):
            start = int(chance.integers(0, 500))
            if engine.load(hashes[start : start + 100]) != 100:
                wrong.append(start)

    threads = [threading.Thread(target=read, args=(engine, seed)) for seed, engine in enumerate(engines)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_what_cannot_go_home_in_time_is_reported(engines, monkeypatch):
    stopped = threading.Event()
    hold_up_pushes(engines[0], stopped, monkeypatch)
    hashes = list(range(NUM_BLOCKS))
    result = engines[0].save(hashes, CcKvOption(timeout=4000))
    stopped.set()
    assert result.success > 500
    assert result.local > 0
    until(lambda: have_pushed(engines))
    found = sum(engines[1].load([block_hash]) for block_hash in hashes[: result.success])
    assert found >= result.success - result.local
    again = engines[0].save(hashes[: result.success])
    assert (again.success, again.local) == (result.success, 0), "saved again, they go home"
    until(lambda: have_pushed(engines))
    until(lambda: engines[1].cc.exists(hashes[: result.success], LONG) == result.success)


def test_what_its_home_has_lost_is_sent_again_when_it_is_saved_again(engines):
    hashes = list(range(200))
    assert engines[0].save(hashes).local == 0
    until(lambda: engines[1].cc.exists(hashes, LONG) == 200)
    for engine in engines[1:]:
        engine.pool.evict(1 << 30)
    assert engines[1].cc.exists(hashes, LONG) < 200
    result = engines[0].save(hashes)
    assert (result.success, result.local) == (200, 0)
    until(lambda: engines[1].cc.exists(hashes, LONG) == 200)


def test_what_its_home_has_is_not_sent_again(engines):
    hashes = list(range(200))
    engines[0].save(hashes)
    until(lambda: have_pushed(engines) and engines[1].cc.exists(hashes, LONG) == 200)
    sent = engines[0].pool.counts["push_done"]
    assert sent > 0
    assert engines[0].save([*hashes, 1000, 1001, 1002, 1003, 1004, 1005]).local == 0
    until(lambda: engines[1].cc.exists([1000, 1001, 1002, 1003, 1004, 1005], LONG) == 6)
    assert engines[0].pool.counts["push_done"] <= sent + 6


def test_blocks_whose_home_is_cut_off_are_local(engines):
    for agent in (engines[1].agent, engines[2].agent):
        agent.close()
    until(lambda: engines[0].save([10**6 + n for n in range(30)]).local > 0)
    hashes = list(range(60))
    result = engines[0].save(hashes, CcKvOption(timeout=60_000, write_rcache=False))
    keys_away = sum(home(key, ["n0", "n1", "n2"]) != "n0" for key in engines[0].pool.block_keys()[-60:])
    assert (result.success, result.local) == (60, keys_away)
    assert engines[0].load(hashes, CcKvOption(read_local_only=True)) == 60


def test_blocks_that_their_home_does_not_take_are_local(engines, caplog):
    """This is reported from the second save on: a node's limit is known only after the first call of it."""
    for engine in engines[1:]:
        object.__setattr__(engine.agent.config, "slab_bytes", BLOCK_BYTES // 2)
    hashes = list(range(60))
    engines[0].save(hashes)
    links = engines[0].agent.peers._links.values()
    until(lambda: all(link._saves.max_block_bytes for link in links))
    result = engines[0].save(hashes)
    keys_away = sum(home(key, ["n0", "n1", "n2"]) != "n0" for key in engines[0].pool.block_keys())
    assert (result.success, result.local) == (60, keys_away)
    texts = [record.getMessage() for record in caplog.records]
    assert len([text for text in texts if f"takes, is {BLOCK_BYTES // 2} and that of this node" in text]) == 2, texts


def test_a_push_under_way_does_not_hold_up_a_load(engines, monkeypatch):
    hashes = list(range(40))
    engines[1].save(hashes)
    until(lambda: have_pushed(engines))
    stopped = threading.Event()
    hold_up_pushes(engines[0], stopped, monkeypatch)
    saved, found = engines[0].save(list(range(1000, 1010))).success, engines[0].load(hashes)
    stopped.set()
    assert (saved, found) == (10, 40)


def test_a_call_that_nobody_answered_while_it_waited_opens_the_breaker(engines):
    (link, *_others) = engines[0].agent.peers._links.values()
    with link._loads[0]._lock:
        for _ in range(2):
            assert engines[0].load(list(range(5000, 5040)), CcKvOption(timeout=3000)) == 0
    assert engines[0].agent.peers.status()[link.address.id] is False


def test_frames_of_a_push_with_parents_say_whose_chain_each_block_is():
    keys = b"".join(bytes([n]) * 32 for n in range(3))
    with pytest.raises(ValueError, match="parents"):
        m.PeerPut("t", keys, [1, 1, 1], bytes(48), parents=bytes(32))
    assert m.PeerPut("t", keys, [1, 1, 1], bytes(48), parents=bytes(96)).parents == bytes(96)
