"""EMSConnector and what vLLM's own prefix cache has but the pool lacks, over a stub of vLLM and an agent."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ems.integration import own
from ems.integration.own import Known
from kvloom.pool.agent import Agent
from tests.support.pool.agents import blocks_of, running_agent
from tests.support.pool.stores import emptied, shortened
from tests.support.vllm.engine import Engine, engine
from tests.support.vllm.stub import BLOCK_SIZE, FakeRequest, FullAttentionSpec, SlidingWindowSpec, Step
from tests.support.waiting import until

PROMPT = list(range(100, 100 + 4 * BLOCK_SIZE + 1))  # four full blocks and a token
BLOCKS, HIT = [0, 1, 2, 3, 4], 4 * BLOCK_SIZE
WINDOW = 2 * BLOCK_SIZE  # of a prefix of whole blocks, the last two


@pytest.fixture(autouse=True)
def _nothing_is_known_for_long(monkeypatch):
    monkeypatch.setattr(own, "KNOWN_S", 0.0)


@pytest.fixture
def socket(tmp_path) -> Path:
    return tmp_path / "ems.sock"


def lose(pool_of: Agent) -> None:
    """The pool has nothing any more, as after its restart."""
    emptied(pool_of.node.pools()[0])


def use(running: Engine, request: FakeRequest, blocks: object, num_steps: int = 1) -> None:
    """A request whose blocks but the last the engine's own cache has. It computes a token a step, and ends."""
    running.matched(request, HIT)
    if (there := running.scheduler._scheduling._tracked[request.request_id].own.there) is not None:
        there.result()
    running.allocate(request, blocks, 0)
    for i in range(num_steps):
        known = {"new": [(request, blocks, HIT)]} if i == 0 else {"running": {request.request_id: ([], HIT + i)}}
        running.step(Step(counts={request.request_id: 1}, **known))
        request.all_token_ids.append(7)
    running.finish(request)


def found(address: Path, **changes: object) -> int:
    """Tokens of PROMPT that another engine finds in the pool."""
    with engine(address, seed=2, **changes) as other:
        return other.matched(FakeRequest("other", list(PROMPT)))[0]


WAYS = [
    {},
    {"extra": {"layerwise": True}},
    {"world_size": 2},
    {"world_size": 2, "mla": True},
    {"kv_role": "kv_producer"},
]


@pytest.mark.parametrize("changes", WAYS, ids=str)
def test_what_the_pool_lost_is_saved_when_a_request_next_uses_it(agent, changes):
    address = agent.config.socket
    others = {name: value for name, value in changes.items() if name != "kv_role"}
    with engine(address, **changes) as running:
        running.compute(FakeRequest("a", list(PROMPT)), BLOCKS)
        lose(agent)
        assert found(address, **others) == 0
        use(running, FakeRequest("b", list(PROMPT)), BLOCKS)
        assert found(address, **others) == HIT
        with engine(address, seed=2, **others) as other:
            request = FakeRequest("c", list(PROMPT))
            assert other.matched(request)[0] == HIT
            if "extra" not in changes:
                assert other.load(request, [9, 8, 7, 6, 5], HIT) == set()
                for mine, theirs in zip([9, 8, 7, 6], range(4), strict=True):
                    assert (other.bytes_of(mine) == running.bytes_of(theirs)).all()


def test_what_was_computed_while_the_pool_was_down_is_saved_when_it_is_next_used(socket):
    with engine(socket, extra={"timeout_ms": 2000}) as running:
        running.compute(FakeRequest("a", list(PROMPT)), BLOCKS)
        with running_agent(socket=socket):
            until(lambda: running.workers[0]._moving.circuit.is_up)
            until(lambda: running.scheduler._scheduling.lookup.is_up)
            use(running, FakeRequest("b", list(PROMPT)), BLOCKS)
            assert found(socket) == HIT


def test_what_the_pool_has_is_not_saved_again(agent):
    with engine(agent.config.socket) as running:
        running.compute(FakeRequest("a", list(PROMPT)), BLOCKS)
        running.workers[0].get_kv_connector_stats()
        use(running, FakeRequest("b", list(PROMPT)), BLOCKS)
        shortened(agent.node.pools()[0])
        use(running, FakeRequest("c", list(PROMPT)), BLOCKS)
        assert running.workers[0].get_kv_connector_stats().data["saved_blocks"] == 1
        assert found(agent.config.socket) == HIT


def test_a_consumer_saves_nothing_of_its_own(agent):
    with engine(agent.config.socket, kv_role="kv_consumer") as consumer:
        consumer.matched(FakeRequest("b", list(PROMPT)), HIT)
        assert consumer.scheduler._scheduling._tracked["b"].own.there is None


def test_a_pool_that_does_not_answer_lacks_nothing(socket):
    with running_agent(socket=socket), engine(socket, extra={"timeout_ms": 2000}) as running:
        running.compute(FakeRequest("a", list(PROMPT)), BLOCKS)
    with running_agent(socket=socket) as agent, engine(socket, extra={"timeout_ms": 2000}) as running:
        agent.close()
        use(running, FakeRequest("b", list(PROMPT)), BLOCKS)
        assert running.workers[0].get_kv_connector_stats() is None, "nothing was tried"
        assert not running.scheduler._scheduling.lookup.is_up


def test_much_is_saved_in_several_steps_and_by_several_requests(agent, monkeypatch):
    monkeypatch.setattr("ems.integration.scheduling.STEP_TOKENS", BLOCK_SIZE)
    with engine(agent.config.socket) as running:
        running.compute(FakeRequest("a", list(PROMPT)), BLOCKS)
        lose(agent)
        use(running, FakeRequest("b", list(PROMPT)), BLOCKS, num_steps=2)
        assert found(agent.config.socket) == 2 * BLOCK_SIZE
        use(running, FakeRequest("c", list(PROMPT)), BLOCKS)
        assert found(agent.config.socket) == 3 * BLOCK_SIZE


def test_what_another_engine_waits_for_is_saved_at_once_and_before_it_is_promised(agent, monkeypatch):
    monkeypatch.setattr("ems.integration.scheduling.STEP_TOKENS", BLOCK_SIZE)
    monkeypatch.setattr(own, "KNOWN_S", 60.0)
    with engine(agent.config.socket, kv_role="kv_producer") as running:
        running.compute(FakeRequest("a", list(PROMPT)), BLOCKS)
        lose(agent)
        request = FakeRequest("b", list(PROMPT), kv_transfer_params={"do_remote_decode": True})
        assert running.matched(request, HIT) == (0, False)
        running.allocate(request, BLOCKS, 0)
        running.step(Step(new=[(request, BLOCKS, HIT)], counts={"b": 1}))
        is_held, promise = running.scheduler.request_finished(request, [])
        assert (is_held, promise) == (True, {"ems_num_tokens": HIT})
        until(lambda: running.step(Step(), {"b"})[0])
        assert found(agent.config.socket) == HIT


def test_a_preempted_request_asks_again(agent):
    with engine(agent.config.socket) as running:
        running.compute(FakeRequest("a", list(PROMPT)), BLOCKS)
        request = FakeRequest("b", list(PROMPT))
        running.matched(request, HIT)
        running.allocate(request, BLOCKS, 0)
        running.step(Step(new=[(request, BLOCKS, HIT)], counts={"b": 1}))
        running.step(Step(preempted={"b"}))
        lose(agent)
        use(running, request, BLOCKS)
        assert found(agent.config.socket) == HIT


SPECS = (SlidingWindowSpec(WINDOW), FullAttentionSpec())
COMPUTED = ([1, 2, 3, 4, 5], [8, 9, 10, 11, 12])


@pytest.fixture
def windows(agent: Agent) -> Iterator[Engine]:
    with engine(agent.config.socket, specs=SPECS) as running:
        running.compute(FakeRequest("a", list(PROMPT)), COMPUTED)
        lose(agent)
        yield running


def test_of_a_window_what_the_next_token_sees_is_saved(agent, windows):
    use(windows, FakeRequest("b", list(PROMPT)), ([0, 0, 3, 4, 6], [8, 9, 10, 11, 13]))
    assert windows.workers[0].get_kv_connector_stats().data["saved_blocks"] == 4 + 5 + 4 + 2 - 1
    assert len(blocks_of(agent.node.pools()[0])) == 4 + 2
    with engine(agent.config.socket, seed=2, specs=SPECS) as other:
        request = FakeRequest("c", list(PROMPT))
        assert other.matched(request) == (HIT, True)
        assert other.load(request, ([0, 0, 1, 2, 3], [4, 5, 6, 7, 8]), HIT) == set()
        assert (other.bytes_of(1) == windows.bytes_of(3)).all()


def test_who_is_given_a_block_of_a_window_waits_for_the_saves_that_read_it(windows):
    shared, overtaken = ([0, 0, 3, 4, 6], [8, 9, 10, 11, 13]), []
    for id in "bc":
        request = FakeRequest(id, list(PROMPT))
        windows.matched(request, HIT)
        windows.scheduler._scheduling._tracked[id].own.there.result()
        windows.allocate(request, shared, 0)
        plan = windows.scheduler._scheduling.plan(Step(new=[(request, shared, HIT)], counts={id: 1}).output())
        assert [save.blocks for save in plan.saves] == [[[8, 9, 10, 11]], [[3, 4]]]
        overtaken += plan.overtaken
    windows.allocate(FakeRequest("d", list(PROMPT)), ([4, 14], [15, 16]), 0)
    overtaken += windows.scheduler._scheduling.plan(Step().output()).overtaken
    assert overtaken == ["a", "b", "c"]


def test_a_request_that_begins_again_without_its_prefix_saves_nothing_of_it(windows):
    """vLLM computes all of a request whose load has failed."""
    request, blocks = FakeRequest("b", list(PROMPT)), ([1, 2, 3, 4, 5], [8, 9, 10, 11, 12])
    windows.matched(request, HIT)
    windows.scheduler._scheduling._tracked["b"].own.there.result()
    windows.allocate(request, blocks, 0)
    plan = windows.scheduler._scheduling.plan(Step(new=[(request, blocks, 0)], counts={"b": 1}).output())
    assert plan.saves == []


def test_blocks_are_known_for_a_while(monkeypatch):
    monkeypatch.setattr(own, "KNOWN_S", 60.0)
    now_s = [0.0]
    known = Known(lambda: now_s[0])
    known.add([1, 2])
    now_s[0] = 30.0
    known.add([2, 3])
    assert [known.count([1, 2, 3, 4]), known.count([4, 1])] == [3, 0]
    now_s[0] = 61.0
    assert [known.count([1]), known.count([2, 3])] == [0, 2]
    now_s[0] = 91.0
    assert known.count([2]) == 0
    assert not known._since_s
