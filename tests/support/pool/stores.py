"""Blocks that an agent gives to a distributed store and takes back."""

from ems import CcKvOption
from kvloom.pool.agent import Agent
from kvloom.pool.storage.pool import Pool
from tests.support.pool.agents import copy_of, new_kv, session, slots_of, tokens_of, zero
from tests.support.waiting import until

HASHES = list(range(100, 116))
BLOCKS = list(range(len(HASHES)))
SLOTS = slots_of(*BLOCKS)
OFFSETS = [4] * len(HASHES)


def saved_and_forgotten(agent: Agent, cc) -> None:
    """Saves HASHES, waits until the store has them, and empties the node's own pool."""
    pool = agent.node.pool("default")
    assert cc.save(SLOTS, HASHES, OFFSETS).success == len(HASHES)
    until(lambda: pool.counts["push_done"] == len(HASHES))
    emptied(pool)


def emptied(pool: Pool) -> None:
    """Evicts all blocks, those too that a session still pins."""

    def is_empty() -> bool:
        pool.evict(1 << 30)
        return pool.usage()["blocks"] == 0

    until(is_empty)


def shortened(pool: Pool) -> None:
    """Evicts the end of one chain, when no session pins a block: a pinned end would stay, and its prefix go."""

    def is_free() -> bool:
        found = [block for block in pool.pin_each(pool.block_keys()) if block is not None]
        pins = {block.pins for block in found}
        pool.unpin(found)
        return pins == {1}

    until(is_free)
    assert pool.evict(1) > 0


def check_round_trip(agent: Agent) -> None:
    kv = new_kv()
    truth = copy_of(kv)
    with session(agent.config.socket, kv) as cc:
        saved_and_forgotten(agent, cc)
        zero(kv)
        assert cc.load(SLOTS, HASHES, OFFSETS, CcKvOption(read_local_only=True)).success == 0
        assert cc.exists([*HASHES, 7]) == len(HASHES)
        assert cc.load([*SLOTS, *slots_of(60)], [*HASHES, 7], [*OFFSETS, 4]).success == len(HASHES)
        assert (tokens_of(kv, SLOTS) == tokens_of(truth, SLOTS)).all()
        assert cc.load(SLOTS, HASHES, OFFSETS, CcKvOption(read_local_only=True)).success == len(HASHES), (
            "kept as copies"
        )
    agent.node.pool("default").check()
