"""The router behind Serve's interface: its choices, what it learns from replicas, what it publishes. Without Ray."""

import asyncio
import itertools
from types import SimpleNamespace

import pytest

from kvloom.engine.schedule.blocks import extend_chain
from kvloom.engine.stats import Stats
from kvloom.fleet.figures import told
from kvloom.fleet.routing.board import board_of
from kvloom.fleet.routing.knowledge import packed
from kvloom.fleet.wire import Hint, encode
from tests.support.lazily import Lazily

pytestmark = pytest.mark.usefixtures("ray_serve")
routing = Lazily("kvloom.fleet.routing.router")

numbers = itertools.count()


def replica(name, layout="", **figures):
    stats = {
        "figures": told(Stats(**{"num_blocks": 100, **figures})), "layout": layout, "block_size": 16,
        "queued_tokens": 0, "has_tier": False,
    }  # fmt: skip
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), routing_stats=stats)


def router(*replicas, **settings):
    """A router as Serve makes one, without Serve's own state, which these tests do not need."""
    made = routing.KvRouter.__new__(routing.KvRouter)
    made._deployment_id = SimpleNamespace(name=f"engines-{next(numbers)}")
    made.initialize_state(**settings)
    made._replicas = {}
    for each in replicas:
        made._learn(each.replica_id.unique_id, each.routing_stats)
    return made


def pending(tokens=range(64), **hint):
    hashes: list[bytes] = []
    extend_chain(hashes, list(tokens), 16, "")
    number = next(numbers)
    made = Hint(f"r{number}", len(tokens), packed(hashes), **hint)
    metadata = SimpleNamespace(internal_request_id=f"i{number}")
    context = SimpleNamespace(should_backoff=False)
    return SimpleNamespace(args=[b"", encode(made)], metadata=metadata, routing_context=context)


def ranks(made, replicas, asked=None):
    chosen = asyncio.run(made.choose_replicas(list(replicas), asked))
    return [[each.replica_id.unique_id for each in rank] for rank in chosen]


def test_a_prompt_goes_where_its_beginning_was_sent():
    both = replica("a"), replica("b")
    made = router(*both)
    made.on_request_routed(first := pending(), both[1].replica_id, None)
    made.on_request_completed(both[1].replica_id, first.metadata.internal_request_id)
    for _ in range(3):
        assert ranks(made, both, pending(range(80)))[0] == ["b"]


def test_load_is_what_was_given_and_is_taken_back_when_it_begins_and_ends():
    both = replica("a"), replica("b")
    made = router(*both)
    made.on_request_routed(asked := pending(), both[0].replica_id, None)
    assert made._ledger.load("a") == 64 + 16
    board_of(made._deployment_id.name).begun.put(f"r{asked.metadata.internal_request_id[1:]}")
    assert ranks(made, both, pending(range(100, 164)))[0] == ["b"]
    assert made._ledger.load("a") == 16
    made.on_request_completed(both[0].replica_id, asked.metadata.internal_request_id)
    assert made._ledger.load("a") == 0


def test_nobody_goes_back_to_where_it_was_lost_unless_there_is_nobody_else():
    both = replica("a"), replica("b")
    made = router(*both)
    assert ranks(made, both, pending(avoid=["a"])) == [["b"]]
    assert sorted(ranks(made, both, pending(avoid=["a", "b"]))) == [["a"], ["b"]]


def test_an_answer_goes_on_with_the_weights_that_began_it():
    both = replica("a", "w8a8"), replica("b", "bf16")
    assert ranks(router(*both), both, pending(layout="bf16")) == [["b"]]
    assert ranks(router(*both), both, pending(layout="bf16", avoid=["b"])) == [["b"]]


@pytest.mark.parametrize("is_of_two", [False, True])
def test_where_no_weights_are_like_those_that_began_it_an_answer_waits(is_of_two):
    both = replica("a", "w8a8"), replica("b", "w8a8")
    made = router(*both, is_of_two=is_of_two)
    assert [replicas for replicas in ranks(made, both, pending(layout="bf16")) if replicas] == []


def test_a_replica_that_has_not_reported_may_be_asked():
    both = replica("a", "w8a8"), replica("b")
    assert len(ranks(router(both[0]), both, pending())) == 2


def test_evictions_are_believed():
    holder, other = replica("a", num_cached_blocks=4), replica("b")
    made = router(holder, other)
    made.on_request_routed(pending(), holder.replica_id, None)
    made._learn("a", replica("a", num_cached_blocks=4).routing_stats)
    made._learn("a", replica("a", num_cached_blocks=0, num_evicted_blocks=4).routing_stats)
    assert made._knowledge.num_keys("a") == 0


def test_by_twos_serve_chooses_among_two_that_are_drawn():
    every = [replica(name) for name in "abcd"]
    made = router(*every, is_of_two=True)
    drawn = [ranks(made, every, pending()) for _ in range(20)]
    assert all(len(rank) == 1 and len(set(rank[0])) == 2 for rank in drawn)
    assert len({tuple(sorted(rank[0])) for rank in drawn}) > 1


def test_a_call_that_is_no_request_is_routed_too():
    both = replica("a"), replica("b")
    assert len(ranks(router(*both), both)) == 2
    asked = SimpleNamespace(args=[], routing_context=SimpleNamespace(should_backoff=False))
    assert len(ranks(router(*both), both, asked)) == 2
    assert asked.routing_context.should_backoff


def test_a_mailbox_is_had_at_the_replica_that_is_meant():
    both = replica("a"), replica("b")
    asked = SimpleNamespace(args=[b"", encode(Hint("", 0, only="b"))], routing_context=SimpleNamespace())
    assert [ranks(router(*both), both, asked) for _ in range(3)] == [[["b"]]] * 3


def test_other_ingresses_load_counts_where_there_are_some():
    loaded, free = replica("a"), replica("b")
    loaded.routing_stats["queued_tokens"] = 5000
    assert ranks(router(loaded, free, is_alone=False), (loaded, free), pending())[0] == ["b"]
    assert router(loaded, free)._ledger.load("a") == 0
