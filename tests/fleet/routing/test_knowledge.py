"""The router's knowledge of replicas' prefix caches: extended by routing, corrected by reports, bounded in size."""

from hypothesis import given
from hypothesis import strategies as st

from kvloom.engine.schedule.blocks import BlockPool, extend_chain
from kvloom.fleet.routing.knowledge import KEY_BYTES, UNREPORTED_BLOCKS, Knowledge, Report, keys_of, packed


def chain(*token_ids, block_size=1, salt=""):
    hashes: list[bytes] = []
    extend_chain(hashes, token_ids, block_size, salt)
    return keys_of(packed(hashes))


def test_keys_are_the_beginnings_of_the_prefix_caches_hashes():
    hashes: list[bytes] = []
    extend_chain(hashes, range(64), 16, "salt")
    assert keys_of(packed(hashes)) == [key[:KEY_BYTES] for key in hashes]


def test_a_prompt_is_known_as_far_as_its_tokens_are_the_same():
    known = Knowledge()
    known.routed("a", chain(1, 2, 3, 4))
    assert known.num_known("a", chain(1, 2, 9, 4)) == 2
    assert known.num_known("a", chain(1, 2, 3, 4, 5)) == 4
    assert known.num_known("b", chain(1, 2)) == 0


def test_prompts_of_other_salts_share_nothing():
    known = Knowledge()
    known.routed("a", chain(1, 2, salt="x"))
    assert known.num_known("a", chain(1, 2, salt="y")) == 0


def test_a_replica_holds_no_more_than_it_has_blocks_and_the_end_goes_first():
    known = Knowledge()
    known.reported("a", Report(num_blocks=3, num_cached=0, total_evicted=0))
    known.routed("a", chain(1, 2, 3, 4, 5))
    assert known.num_known("a", chain(1, 2, 3, 4, 5)) == 3


def test_what_was_used_last_is_kept():
    known = Knowledge()
    known.reported("a", Report(4, 0, 0))
    known.routed("a", chain(1, 2))
    known.routed("a", chain(7, 8))
    known.routed("a", chain(1, 2))
    known.routed("a", chain(5, 6))
    assert (known.num_known("a", chain(1, 2)), known.num_known("a", chain(7, 8))) == (2, 0)


def test_a_report_of_an_emptier_cache_is_believed():
    known = Knowledge()
    known.routed("a", chain(1, 2, 3, 4))
    known.reported("a", Report(100, 4, 0))
    known.reported("a", Report(100, 1, 0))
    assert known.num_known("a", chain(1, 2, 3, 4)) == 1


def test_what_was_routed_since_the_last_report_may_not_be_in_this_one():
    known = Knowledge()
    known.reported("a", Report(100, 0, 0))
    known.routed("a", chain(1, 2))
    known.reported("a", Report(100, 0, 0))
    assert known.num_known("a", chain(1, 2)) == 2
    known.reported("a", Report(100, 0, 0))
    assert known.num_known("a", chain(1, 2)) == 0


def test_evictions_take_their_share_of_what_is_known():
    known = Knowledge()
    known.routed("a", chain(*range(10)))
    known.reported("a", Report(20, 20, 0))
    known.reported("a", Report(20, 10, 10))
    assert known.num_keys("a") == 5


def test_a_replica_that_began_anew_holds_nothing():
    for again in (Report(100, 50, 0, epoch=1), Report(100, 50, 2)):
        known = Knowledge()
        known.routed("a", chain(1, 2))
        known.reported("a", Report(100, 50, 7))
        known.reported("a", again)
        assert known.num_known("a", chain(1, 2)) == 0


def test_who_is_gone_is_forgotten():
    known = Knowledge()
    known.routed("a", chain(1))
    known.routed("b", chain(1))
    known.keep(["b"])
    assert (known.num_keys("a"), known.num_keys("b")) == (0, 1)


def test_the_pool_is_known_and_bounded():
    known = Knowledge(max_pooled=3)
    known.saved(chain(1, 2, 3, 4))
    assert known.num_pooled(chain(1, 2, 3, 4)) == 3


prompts = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), max_size=30)


@given(prompts, st.integers(1, 40))
def test_never_more_keys_than_blocks(given_prompts, num_blocks):
    known = Knowledge()
    known.reported("a", Report(num_blocks, 0, 0))
    for tokens in given_prompts:
        keys = chain(*tokens)
        known.routed("a", keys)
        assert known.num_keys("a") <= min(num_blocks, UNREPORTED_BLOCKS)
        assert known.num_known("a", keys) == min(len(keys), num_blocks)


@given(prompts, st.integers(12, 40))
def test_with_one_prompt_after_the_other_nothing_is_believed_that_the_cache_does_not_hold(given_prompts, num_blocks):
    pool, known, total_evicted = BlockPool(num_blocks), Knowledge(), 0
    known.reported("a", Report(num_blocks, 0, 0))
    for tokens in given_prompts:
        hashes: list[bytes] = []
        extend_chain(hashes, tokens, 1, "")
        keys = keys_of(packed(hashes))
        hits = pool.match(hashes)
        assert known.num_known("a", keys) <= len(hits)
        before = pool.num_cached
        pool.retain(hits)
        fresh = pool.allocate(len(hashes) - len(hits))
        assert fresh is not None
        total_evicted += before - pool.num_cached
        for block, key in zip([*hits, *fresh], hashes, strict=True):
            pool.publish(block, key)
        pool.release([*hits, *fresh])
        assert pool.num_evicted == total_evicted
        known.routed("a", keys)
        known.reported("a", Report(num_blocks, pool.num_cached, pool.num_evicted))
