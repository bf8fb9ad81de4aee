"""BlockPool: reference counts, the prefix cache, and what is evicted first."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvloom.engine.schedule.blocks import BASE, BlockPool, LastChain, Scope, Switch, chain_hash, extend_chain, root_hash


def hashes_of(tokens: list[int], salt: str = "") -> list[bytes]:
    hashes: list[bytes] = []
    extend_chain(hashes, tokens, 2, salt)
    return hashes


def test_a_full_pool_answers_none_and_changes_nothing():
    pool = BlockPool(2)
    assert pool.allocate(3) is None
    assert pool.num_free == 2
    assert pool.allocate(2) == [0, 1]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_a_published_block_is_found_after_its_last_holder_has_gone():
    pool = BlockPool(3)
    hashes = hashes_of([1, 2, 3, 4])
    blocks = pool.allocate(2)
    assert blocks is not None
    for block, key in zip(blocks, hashes, strict=True):
        pool.publish(block, key)
    pool.release(blocks)
    assert pool.num_free == 3
    assert pool.match(hashes) == blocks
    assert pool.match(hashes_of([1, 2, 9, 9])) == blocks[:1]
    assert pool.match(hashes_of([9, 9, 3, 4])) == []
    pool.retain(blocks)
    assert pool.num_free == 1
    assert pool.num_exclusive(blocks) == 2
    pool.retain(blocks)
    assert pool.num_exclusive(blocks) == 0
    assert pool.num_holders(blocks[0]) == 2
    pool.check()


def test_unpublished_blocks_are_given_away_before_cached_ones_and_the_end_of_a_prefix_before_its_beginning():
    pool = BlockPool(4)
    hashes = hashes_of([1, 2, 3, 4, 5, 6])
    blocks = pool.allocate(4)
    assert blocks is not None
    for block, key in zip(blocks, hashes, strict=False):
        pool.publish(block, key)
    pool.release(blocks)
    assert pool.allocate(1) == [blocks[3]]
    assert pool.allocate(1) == [blocks[2]]
    assert pool.match(hashes) == blocks[:2]
    assert pool.num_cached == 2


def test_empty_blocks_are_given_away_before_cached_ones_released_earlier():
    pool = BlockPool(2)
    pool.allocate(2)
    pool.publish(0, b"key")
    pool.release([0])
    pool.release([1])
    assert pool.allocate(1) == [1]


def test_a_prefix_ends_where_a_block_is_missing():
    pool = BlockPool(2)
    hashes = hashes_of([1, 2, 3, 4])
    pool.allocate(1)
    pool.publish(0, hashes[1])
    assert pool.match(hashes) == []


def test_the_first_block_of_a_hash_stays_the_one_found():
    pool = BlockPool(2)
    (key,) = hashes_of([1, 2])
    pool.allocate(2)
    pool.publish(0, key)
    pool.publish(1, key)
    pool.publish(0, b"another")
    assert pool.match([key]) == [0]
    assert pool.match([b"another"]) == []
    pool.check()


def test_without_caching_nothing_is_found():
    pool = BlockPool(1, is_caching=False)
    pool.allocate(1)
    pool.publish(0, b"key")
    assert pool.match([b"key"]) == []
    pool.check()


def test_releasing_twice_is_our_mistake():
    pool = BlockPool(1)
    pool.allocate(1)
    pool.release([0])
    with pytest.raises(AssertionError, match="released more often"):
        pool.release([0])


def test_dropping_forgets_what_nobody_holds():
    pool = BlockPool(4)
    held, idle = pool.allocate(2), pool.allocate(1)
    assert held
    assert idle
    keys = [bytes([i]) * 32 for i in range(2)]
    pool.publish(held[0], keys[0])
    pool.publish(idle[0], keys[1])
    pool.release(idle)
    assert pool.drop_cached() == sorted(set(range(4)) - set(held))
    assert [pool.match([key]) for key in keys] == [[held[0]], []]
    pool.check()


def test_what_is_forgotten_is_not_found_and_stays_with_its_holders():
    pool = BlockPool(3)
    blocks = pool.allocate(2) or []
    for block, key in zip(blocks, (b"a", b"b"), strict=True):
        pool.publish(block, key)
    pool.release(blocks[1:])
    pool.forget_all()
    assert pool.match([b"a", b"b"]) == []
    assert (pool.num_cached, pool.num_free) == (0, 2)
    assert pool.num_holders(blocks[0]) == 1
    assert pool.publish(blocks[0], b"a")
    pool.check()


def test_a_hash_covers_all_tokens_before_it_and_the_salt():
    assert hashes_of([1, 2, 3, 4])[1] != hashes_of([9, 2, 3, 4])[1]
    assert hashes_of([1, 2], "tenant a") != hashes_of([1, 2], "tenant b")
    assert hashes_of([1, 2, 3]) == [chain_hash(root_hash(""), [1, 2])]


def test_a_chain_grows_as_if_made_at_once():
    grown: list[bytes] = []
    tokens = list(range(7))
    for length in range(8):
        extend_chain(grown, tokens[:length], 2, "s")
    assert grown == hashes_of(tokens, "s")


def test_a_chain_that_begins_like_the_last_one_is_hashed_from_where_they_part(monkeypatch: pytest.MonkeyPatch):
    hashed: list[tuple[int, ...]] = []

    def chained(parent: bytes, ids: tuple[int, ...]) -> bytes:
        hashed.append(ids)
        return chain_hash(parent, ids)

    monkeypatch.setattr("kvloom.engine.schedule.blocks.chain_hash", chained)
    last = LastChain()
    other = Scope("s")
    for token_ids, scope, expected in [
        ((1, 2, 3, 4, 5), BASE, [(1, 2), (3, 4)]),
        ((1, 2, 3, 4, 5), BASE, []),
        ((1, 2, 3, 9), BASE, [(3, 9)]),
        ((1, 2, 3), BASE, []),
        ((1, 2, 3, 9), BASE, [(3, 9)]),  # the last one is known, and no other
        ((1, 2, 3, 9), other, [(1, 2), (3, 9)]),
        ((9, 2, 3, 9), other, [(9, 2), (3, 9)]),
        ((), other, []),
    ]:
        hashed.clear()
        found = last.of(token_ids, 2, scope)
        assert hashed == expected
        assert found == hashes_of(list(token_ids), scope.salt)
    assert last.of((1, 2, 3, 4), 2, BASE) != last.of((1, 2, 3, 4), 1, BASE)[:2]
    grown = last.of((1, 2), 2, BASE)
    grown.append(b"of the caller")
    assert last.of((1, 2, 3, 4), 2, BASE) == hashes_of([1, 2, 3, 4])


class PoolMachine(RuleBasedStateMachine):
    """Random calls against a toy model: who holds which block, and what each published block contains."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6)
        self.tables: list[list[int]] = []
        self.contents: dict[int, bytes] = {}

    @rule(count=st.integers(0, 4), key=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def allocate(self, count: int, key: bytes) -> None:
        free = self.pool.num_free
        blocks = self.pool.allocate(count)
        assert (blocks is None) == (count > free)
        if blocks is None:
            return
        assert len(set(blocks)) == count
        assert not set(blocks) & {block for table in self.tables for block in table}
        for block in blocks:
            self.contents[block] = key
            self.pool.publish(block, key)
        self.tables.append(blocks)

    @rule(key=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def reuse(self, key: bytes) -> None:
        found = self.pool.match([key])
        assert all(self.contents[block] == key for block in found)
        self.pool.retain(found)
        self.tables.append(found)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @invariant()
    def holders_are_counted(self) -> None:
        self.pool.check()
        for block in range(6):
            holders = sum(table.count(block) for table in self.tables)
            assert self.pool.num_holders(block) == holders
            assert self.pool.is_idle(block) == (holders == 0)


TestPoolMachine = PoolMachine.TestCase


def test_chains_part_at_the_block_of_the_switch():
    tokens = list(range(16))

    def chain(switch=None):
        hashes: list[bytes] = []
        extend_chain(hashes, tokens[:6], 4, "", switch)
        extend_chain(hashes, tokens, 4, "", switch)  # what is appended later is hashed alike
        return hashes

    whole: list[bytes] = []
    extend_chain(whole, tokens, 4, "", Switch(6, "a"))
    assert chain(Switch(6, "a")) == whole
    chains = [chain(), chain(Switch(6, "a")), chain(Switch(5, "a")), chain(Switch(6, "b")), chain(Switch(0, "a"))]
    assert [len({own[i] for own in chains}) for i in range(4)] == [2, 5, 5, 5]
    assert chain(Switch(99, "a")) == chain()
