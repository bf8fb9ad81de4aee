"""EMSConnector for models with sliding windows beside full attention: plain data, and a stub of vLLM over an agent."""

import random
from collections.abc import Iterator

import pytest

from ems.integration.plan import Duties
from ems.integration.prefix import Kind, kinds_of, longest_hit, unit_of
from ems.integration.scheduling import Scheduling
from kvloom.pool.agent import Agent
from tests.support.pool.agents import blocks_of
from tests.support.vllm.engine import Engine, engine
from tests.support.vllm.stub import BLOCK_SIZE, FakeRequest, FullAttentionSpec, SlidingWindowSpec, Step
from tests.support.waiting import until

WINDOW = 2 * BLOCK_SIZE  # a token sees itself and 7 before it: of a prefix of whole blocks, the last two
PROMPT = list(range(100, 100 + 6 * BLOCK_SIZE + 1))  # six full blocks and a token
SPECS = (SlidingWindowSpec(WINDOW), FullAttentionSpec(), SlidingWindowSpec(WINDOW))
HIT, MISS = (6 * BLOCK_SIZE, True), (0, False)


# Plain data


@pytest.mark.parametrize(
    ("window", "num_tokens", "first"),
    [(None, 100, 0), (8, 0, 0), (8, 7, 0), (8, 11, 1), (8, 24, 4), (9, 24, 4), (10, 24, 3), (1, 24, 6)],
)
def test_a_window_needs_the_blocks_that_its_next_token_sees(window, num_tokens, first):
    kind = Kind((0,), 4, window)
    assert kind.first_needed(num_tokens) == first
    seen = range(max(0, num_tokens - (window or num_tokens + 1) + 1), num_tokens)  # what the next token sees
    assert first == (seen.start if seen else num_tokens) // 4


def test_groups_that_see_equally_far_are_of_one_kind():
    kinds = kinds_of([(16, 128), (16, None), (32, 128), (16, 128), (16, None)])
    assert kinds == (Kind((1, 4), 16), Kind((0, 3), 16, 128), Kind((2,), 32, 128))
    assert unit_of(kinds) == 32


def brute_force(kinds: tuple[Kind, ...], there: list[set[int]], start: int, end: int) -> int:
    """The longest prefix whose needed blocks are all in `there`, found by trying each."""
    unit = unit_of(kinds)
    for stop in range(end, start, -unit):
        if all(set(kind.range_of(start, stop)) <= blocks for kind, blocks in zip(kinds, there, strict=True)):
            return stop
    return start


def test_the_longest_hit_is_that_of_trying_all():
    source = random.Random(5)
    hits = set()
    for _ in range(2000):
        sizes = [source.choice([2, 4, 6]) for _ in range(3)]
        windows = [source.choice([None, 1, 3, 9, 17]) for _ in range(3)]
        kinds = kinds_of(list(zip(sizes, windows, strict=True))[: source.randint(1, 3)])
        unit = unit_of(kinds)
        start = source.randrange(3) * unit
        end = start + source.randint(1, 6) * unit
        holes = source.random() ** 2
        there = [{i for i in range(end // kind.block_size) if source.random() > holes} for kind in kinds]

        def count(kind: int, first: int, last: int, there: list[set[int]] = there) -> int:
            return next((i for i in range(last - first) if first + i not in there[kind]), last - first)

        found = longest_hit(kinds, start, end, count)
        assert found == brute_force(kinds, there, start, end)
        hits.add((found - start) // unit)
    assert hits == set(range(7))


# Over an agent


WINDOWS, FULL = ([1, 2, 3, 4, 5, 6, 7], [15, 16, 17, 18, 19, 20, 21]), [8, 9, 10, 11, 12, 13, 14]
COMPUTED = (WINDOWS[0], FULL, WINDOWS[1])
LOADED = ([0, 0, 0, 0, 1, 2], [3, 4, 5, 6, 7, 8], [0, 0, 0, 0, 9, 10])  # as vLLM allocates them: 0 is the null block


@pytest.fixture
def first(agent: Agent) -> Iterator[Engine]:
    """An engine that has computed PROMPT in the blocks COMPUTED."""
    with engine(agent.config.socket, specs=SPECS) as running:
        running.compute(FakeRequest("a", list(PROMPT)), COMPUTED)
        yield running


def damage(agent: Agent, first: Engine, *blocks: int) -> None:
    """Flips a bit of the pool's block that holds the bytes of `blocks`, one of each group."""
    pool = agent.node.pools()[0]
    truth = b"".join(first.bytes_of(block).numpy().tobytes() for block in blocks)
    (entry,) = [each for each in blocks_of(pool) if bytes(pool.view(each.offset, each.length)) == truth]
    pool.view(entry.offset, entry.length)[5] ^= 1


def test_of_a_window_only_its_end_is_loaded(agent, first):
    with engine(agent.config.socket, seed=2, specs=SPECS) as second:
        request, before = FakeRequest("b", list(PROMPT)), second.bytes_of(0).clone()
        assert second.matched(request) == HIT
        assert second.load(request, LOADED, HIT[0]) == set()
        for mine, theirs in zip(range(1, 11), [5, 6, *FULL[:6], 19, 20], strict=True):
            assert (second.bytes_of(mine) == first.bytes_of(theirs)).all()
        assert (second.bytes_of(0) == before).all()
        assert second.workers[0].get_kv_connector_stats().data["loaded_blocks"] == 6 + 2


def test_what_the_engine_has_of_a_window_is_not_loaded(agent, first):
    with engine(agent.config.socket, seed=2, specs=SPECS) as second:
        request, before = FakeRequest("b", list(PROMPT)), second.bytes_of(1).clone()
        assert second.matched(request, 5 * BLOCK_SIZE) == (BLOCK_SIZE, True)
        assert second.load(request, LOADED, BLOCK_SIZE) == set()
        assert (second.bytes_of(2) == first.bytes_of(6)).all()
        assert (second.bytes_of(1) == before).all()


def test_a_block_outside_of_the_window_may_be_gone(agent, first):
    damage(agent, first, 4, 18)
    with engine(agent.config.socket, seed=2, specs=SPECS) as second:
        request = FakeRequest("b", list(PROMPT))
        assert second.matched(request) == HIT
        assert second.load(request, LOADED, HIT[0]) == set()


@pytest.mark.parametrize(("blocks", "left"), [((5, 19), 4), ((10,), 2)])
def test_a_load_that_fails_is_the_requests_and_prefixes_end_before_it(agent, first, blocks, left):
    """The windows' fifth block or the third of full attention is damaged. vLLM takes no single failed blocks here."""
    damage(agent, first, *blocks)
    num_blocks = len(blocks_of(agent.node.pools()[0]))
    with engine(agent.config.socket, seed=2, specs=SPECS) as second:
        request = FakeRequest("b", list(PROMPT))
        assert second.matched(request) == HIT
        assert second.load(request, LOADED, HIT[0]) == {"b"}
        until(
            lambda: len(blocks_of(agent.node.pools()[0])) < num_blocks
        )  # the agent is told of the damage on another connection
        assert second.matched(request) == MISS, "computed by itself"
        assert second.matched(FakeRequest("c", list(PROMPT))) == (left * BLOCK_SIZE, True)


def test_a_model_of_windows_alone_loads_its_window_or_nothing(agent):
    """After a failed load nothing is usable: a shorter prefix would need a block that was not loaded."""
    specs = (SlidingWindowSpec(WINDOW),)
    with engine(agent.config.socket, specs=specs) as first, engine(agent.config.socket, seed=2, specs=specs) as second:
        first.compute(FakeRequest("a", list(PROMPT)), (FULL,))
        request = FakeRequest("b", list(PROMPT))
        assert second.matched(request) == HIT
        assert second.load(request, (LOADED[0],), HIT[0]) == set()
        assert (second.bytes_of(2) == first.bytes_of(FULL[5])).all()
        damage(agent, first, FULL[5])
        unlucky = FakeRequest("c", list(PROMPT))
        assert second.matched(unlucky) == HIT
        assert second.load(unlucky, (LOADED[2],), HIT[0]) == {"c"}
        until(
            lambda: second.matched(FakeRequest("d", list(PROMPT))) == (5 * BLOCK_SIZE, True)
        )  # the damaged block is dropped


def test_models_with_other_windows_share_nothing(agent, first):
    """Even where memory layouts are alike, no model finds another's blocks."""
    for specs in [(), SPECS[:2], (SlidingWindowSpec(WINDOW), FullAttentionSpec(), SlidingWindowSpec(WINDOW + 1))]:
        with engine(agent.config.socket, seed=2, specs=specs) as other:
            assert other.matched(FakeRequest("b", list(PROMPT))) == MISS


def test_ranks_and_events_of_several_kinds(agent):
    with (
        engine(agent.config.socket, world_size=2, events=True, specs=SPECS) as two,
        engine(agent.config.socket, seed=7, world_size=2, specs=SPECS) as other,
    ):
        made = FakeRequest("a", list(PROMPT))
        two.compute(made, COMPUTED)
        told = until(lambda: two.step(Step()) and list(two.scheduler.take_events()))
        assert [event.block_hashes for event in told] == [[each] for each in made.block_hashes]
        assert {event.group_idx for event in told} == {1}, "those of full attention"
        request = FakeRequest("b", list(PROMPT))
        assert other.matched(request) == HIT
        assert other.load(request, LOADED, HIT[0]) == set()
        for rank in range(2):
            assert (other.bytes_of(10, rank) == two.bytes_of(20, rank)).all()


# Blocks that vLLM takes back while a request runs


def test_who_is_given_a_block_of_a_window_waits_for_the_save_that_reads_it(agent):
    with engine(agent.config.socket, specs=SPECS) as running:
        request = FakeRequest("a", list(PROMPT))
        running.allocate(request, COMPUTED, 0)
        first = running.scheduler.build_connector_meta(
            Step(new=[(request, COMPUTED, 0)], counts={"a": len(PROMPT)}).output()
        )
        assert first.plan.overtaken == []
        worker = running.workers[0]
        worker.bind_connector_metadata(first)
        worker.wait_for_save()
        other = FakeRequest("b", [7, *PROMPT])
        running.allocate(other, ([3], [22], [17]), 0)
        second = running.scheduler.build_connector_meta(Step().output())
        assert second.plan.overtaken == ["a"]
        worker.handle_preemptions(second)
        assert worker._moving._saves == []
        truth = [running.bytes_of(block).clone() for block in (5, 8, 19)]
        for memory in running.caches[0].values():
            memory.zero_()
        assert running.scheduler.build_connector_meta(Step().output()).plan.overtaken == [], "once"
        running.finish(request)
        late = FakeRequest("c", list(PROMPT))
        assert running.matched(late) == HIT
        assert running.load(late, LOADED, HIT[0]) == set()
        for block, bytes_before in zip((1, 3, 9), truth, strict=True):
            assert (running.bytes_of(block) == bytes_before).all()


def test_a_block_that_may_be_somebody_elses_is_not_saved():
    """Its last token became known after the window had passed it: vLLM may have given the block to another request."""
    kinds = kinds_of([(BLOCK_SIZE, None), (BLOCK_SIZE, 2)])
    scheduling = Scheduling(kinds, lambda *_request: (None, 0), Duties())
    request = FakeRequest("a", PROMPT[: BLOCK_SIZE + 1])
    scheduling.allocated(request, ([1, 2, 3], [4, 5, 6]), 0)
    step = Step(new=[(request, ([1, 2, 3], [4, 5, 6]), 0)], counts={"a": 2 * BLOCK_SIZE})
    plan = scheduling.plan(step.output())
    assert [(save.kind, save.blocks) for save in plan.saves] == [(0, [[1]]), (1, [[4]])]
    request.all_token_ids.extend(PROMPT[BLOCK_SIZE + 1 : 2 * BLOCK_SIZE + 2])
    plan = scheduling.plan(Step(running={"a": ([], 2 * BLOCK_SIZE + 1)}, counts={"a": 1}).output())
    assert [(save.kind, save.blocks) for save in plan.saves] == [(0, [[2]])], "the window sees tokens 8 and 9 only"
    scheduling.close()
