"""EMSConnector when the pool fails: killed agents and full pools, with blocks moved whole and layer by layer."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pool.agents import running_agent
from tests.support.pool.faults import AgentProcess
from tests.support.vllm.engine import Engine, engine
from tests.support.vllm.stub import BLOCK_SIZE, FakeRequest, FullAttentionSpec, SlidingWindowSpec, Step
from tests.support.waiting import until

NUM_BLOCKS = 6
PROMPT = list(range(100, 100 + NUM_BLOCKS * BLOCK_SIZE + 1))
HIT = NUM_BLOCKS * BLOCK_SIZE
WINDOWS = (FullAttentionSpec(), SlidingWindowSpec(2 * BLOCK_SIZE))
WAYS = {
    "whole": {"extra": {"timeout_ms": 3000}},
    "layerwise": {"extra": {"timeout_ms": 3000, "layerwise": True}},
    "windows": {"extra": {"timeout_ms": 3000}, "specs": WINDOWS},
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    with AgentProcess(tmp_path / "ems.sock") as running:
        yield running


def blocks_of(way: str, first: int = 0) -> tuple[list[int], ...]:
    """A request's block numbers, a list for each group of layers."""
    groups = 2 if way == "windows" else 1
    size = NUM_BLOCKS + 1
    return tuple(list(range(first + group * size, first + (group + 1) * size)) for group in range(groups))


def begin(running: Engine, way: str, name: str = "a") -> FakeRequest:
    """Computes a request's prompt in one step, and leaves its saves in flight."""
    request = FakeRequest(name, list(PROMPT))
    blocks = blocks_of(way)
    running.allocate(request, blocks, 0)
    running.step(Step(new=[(request, blocks, 0)], counts={name: len(PROMPT)}))
    return request


def is_found(running: Engine, name: str) -> bool:
    return running.matched(FakeRequest(name, list(PROMPT)))[0] == HIT


def test_an_agent_that_is_killed_while_it_saves_lets_blocks_go(agent, way):
    """The request's blocks become free, and the engine continues with the restarted agent."""
    with engine(agent.socket, **WAYS[way]) as one:
        with agent.stopped():
            request = begin(one, way)
            agent.kill()
        one.finish(request)
        assert one.workers[0].get_kv_connector_stats().data["unsaved_blocks"] >= NUM_BLOCKS
        agent.start()
        until(lambda: one.workers[0]._moving.circuit.is_up)
        one.finish(begin(one, way, "b"))
        numbers = iter(range(100))
        until(lambda: is_found(one, f"c{next(numbers)}"))


def test_an_agent_that_is_killed_while_it_loads_costs_no_answer(agent, way):
    """Blocks that do not come are reported before the request runs; no block of the cache is written in part."""
    with engine(agent.socket, **WAYS[way]) as one, engine(agent.socket, seed=2, **WAYS[way]) as two:
        one.finish(begin(one, way))
        names = iter(range(100))
        until(lambda: is_found(two, f"b{next(names)}"))
        request = FakeRequest("c", list(PROMPT))
        found, is_async = two.matched(request)
        agent.kill()
        if is_async:
            failed = two.load(request, blocks_of(way, 10), found)
            assert failed == ({"c"} if way == "windows" else set(blocks_of(way, 10)[0][:NUM_BLOCKS]))
        assert two.matched(FakeRequest("d", list(PROMPT))) == (0, False)
        two.finish(begin(two, way, "e"))


def test_a_full_pool_gives_what_it_has_left(way):
    """Most of 16 prompts are evicted; whatever a lookup promises is loaded, and no save stays pending."""
    with (
        running_agent(pool_bytes=32 << 10, segment_bytes=32 << 10, slab_bytes=8 << 10) as small,
        engine(small.config.socket, **WAYS[way]) as one,
    ):
        mine, others = blocks_of(way), blocks_of(way, 15)
        prompts = [[1000 * number + token for token in PROMPT] for number in range(16)]
        for number, tokens in enumerate(prompts):
            request = FakeRequest(f"a{number}", tokens)
            one.allocate(request, mine, 0)
            one.step(Step(new=[(request, mine, 0)], counts={request.request_id: len(tokens)}))
            one.finish(request)
        assert small.node.pools()[0].usage()["blocks"] < 16 * NUM_BLOCKS
        truth = [[one.bytes_of(block).clone() for block in group] for group in mine]
        for number, tokens in enumerate(prompts):
            request = FakeRequest(f"b{number}", tokens)
            found, is_async = one.matched(request)
            if is_async:
                assert one.load(request, others, found) == set()
            else:
                one.allocate(request, others, found)
                one.step(Step(new=[(request, others, found)], counts={request.request_id: len(tokens) - found}))
            for index in range(found // BLOCK_SIZE)[-1:]:  # the last block is in the window as well
                for group, right in zip(others, truth, strict=True):
                    assert (one.bytes_of(group[index]) == right[index]).all()
            one.finish(request)
        assert one.workers[0]._moving._saves == []
