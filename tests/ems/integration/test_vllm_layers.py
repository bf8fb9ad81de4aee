"""EMSConnector layer by layer: over a stub of vLLM and an agent, with copies held back, and with a fake of CUDA."""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ems.integration import layers
from ems.integration.layers import Rows, Side
from kvloom.pool.agent import Agent
from tests.support.pool.agents import blocks_of
from tests.support.pool.faults import AgentProcess
from tests.support.vllm.engine import Engine, engine
from tests.support.vllm.stub import (
    BLOCK_SIZE,
    FakeRequest,
    FullAttentionSpec,
    KVConnectorRole,
    SlidingWindowSpec,
    Step,
    kv_cache_config,
    stubbed_vllm,
    vllm_config,
)
from tests.support.waiting import until

PROMPT = list(range(100, 100 + 4 * BLOCK_SIZE + 1))  # four full blocks and a token
BLOCKS, LOADED = [0, 1, 2, 3, 4], [9, 8, 7, 6, 5]
HIT, MISS = 4 * BLOCK_SIZE, (0, False)
LAYERWISE = {"extra": {"layerwise": True}}


@pytest.fixture
def first(agent: Agent) -> Iterator[Engine]:
    """An engine that has computed PROMPT in blocks 0 to 4, layer by layer."""
    with engine(agent.config.socket, **LAYERWISE) as running:
        running.compute(FakeRequest("a", list(PROMPT)), BLOCKS)
        yield running


def run(running: Engine, request: FakeRequest, num_loaded: int) -> None:
    """Runs the request's first step, in which its blocks are loaded."""
    running.allocate(request, LOADED, num_loaded)
    count = request.num_tokens - num_loaded
    running.step(Step(new=[(request, LOADED, num_loaded)], counts={request.request_id: count}))


@pytest.mark.parametrize("is_layerwise", [True, False])
def test_blocks_have_the_names_of_blocks_that_are_moved_whole(agent, first, is_layerwise):
    with engine(agent.config.socket, seed=2, extra={"layerwise": is_layerwise}) as second:
        request = FakeRequest("b", list(PROMPT))
        assert second.matched(request) == (HIT, not is_layerwise), "layer by layer is within the step"
        if is_layerwise:
            run(second, request, HIT)
        else:
            second.load(request, LOADED, HIT)
        for mine, theirs in zip(LOADED[:4], range(4), strict=True):
            assert (second.bytes_of(mine) == first.bytes_of(theirs)).all()
        assert second.workers[0].get_kv_connector_stats().data["loaded_blocks"] == 4


def test_what_was_moved_whole_is_loaded_layer_by_layer(agent):
    with engine(agent.config.socket) as whole, engine(agent.config.socket, seed=2, **LAYERWISE) as second:
        whole.compute(FakeRequest("a", list(PROMPT)), BLOCKS)
        request = FakeRequest("b", list(PROMPT))
        assert second.matched(request, 2 * BLOCK_SIZE) == (2 * BLOCK_SIZE, False)
        before = second.bytes_of(9).clone()
        run(second, request, 2 * BLOCK_SIZE)
        assert (second.bytes_of(7) == whole.bytes_of(2)).all()
        assert (second.bytes_of(9) == before).all(), "what the engine has is not touched"


def test_a_damaged_block_has_failed_before_its_request_runs(agent, first):
    """vLLM is told of a shorter prefix: neither the damaged block nor any block behind it is written to the cache."""
    pool = agent.node.pools()[0]
    for entry in blocks_of(pool)[2:3]:
        pool.view(entry.offset, entry.length)[5] ^= 1
    with engine(agent.config.socket, seed=2, **LAYERWISE) as second:
        request, before = FakeRequest("b", list(PROMPT)), second.bytes_of(7).clone()
        assert second.matched(request) == (2 * BLOCK_SIZE, False)
        run(second, request, 2 * BLOCK_SIZE)
        assert (second.bytes_of(8) == first.bytes_of(1)).all()
        assert (second.bytes_of(7) == before).all()
        assert second.workers[0].get_block_ids_with_load_errors() == set()
        assert second.workers[0].get_kv_connector_stats().data["failed_blocks"] == 2


def test_ranks_agree_on_what_is_staged(agent, monkeypatch):
    """The smallest count decides; here its rank reports last."""
    told = defaultdict[int, list[int]](list)

    def tell_least_last(reports):
        for number, counts in reports.items():
            told[number] += counts
            if len(told[number]) == 2:
                tell({number: sorted(told[number], reverse=True)})

    with (
        engine(agent.config.socket, world_size=2, **LAYERWISE) as two,
        engine(agent.config.socket, seed=7, world_size=2, **LAYERWISE) as other,
    ):
        two.compute(FakeRequest("a", list(PROMPT)), BLOCKS)
        pool = agent.node.pools()[0]
        truth = two.bytes_of(3, rank=1).numpy().tobytes()
        (entry,) = [each for each in blocks_of(pool) if bytes(pool.view(each.offset, each.length)) == truth]
        pool.view(entry.offset, entry.length)[5] ^= 1
        tell = other.scheduler._scheduling.staged
        monkeypatch.setattr(other.scheduler._scheduling, "staged", tell_least_last)
        request = FakeRequest("b", list(PROMPT))
        assert other.matched(request) == (3 * BLOCK_SIZE, False)
        run(other, request, 3 * BLOCK_SIZE)
        for rank in range(2):
            assert (other.bytes_of(7, rank) == two.bytes_of(2, rank)).all()


def test_without_an_agent_everything_is_computed(tmp_path):
    with engine(tmp_path / "nobody.sock", extra={"timeout_ms": 50, "layerwise": True}) as alone:
        request = FakeRequest("a", list(PROMPT))
        assert alone.matched(request) == MISS
        alone.compute(request, BLOCKS)
        assert alone.workers[0].get_kv_connector_stats().data["unsaved_blocks"] == 4


def test_saves_to_an_agent_that_stands_still_end_together(tmp_path, monkeypatch):
    """Requests keep their blocks until their saves are over, so these do not each try for as long as the first."""
    extra = {"timeout_ms": 500, "layerwise": True}
    with AgentProcess(tmp_path / "ems.sock") as agent, engine(agent.socket, extra=extra) as one:
        caching, calls = one.workers[0]._layers._session.caching, []
        save = caching.save
        monkeypatch.setattr(caching, "save", lambda *args: (calls.append(args), save(*args))[1])
        requests = [FakeRequest(str(i), [i, *PROMPT]) for i in range(20)]
        with agent.stopped():
            for request in requests:
                run(one, request, 0)
            for request in requests:
                one.finish(request)
        assert 0 < len(calls) < 10


def test_an_agent_that_dies_while_staging_is_a_miss(agent, first):
    with engine(agent.config.socket, seed=2, **LAYERWISE) as second:
        request = FakeRequest("b", list(PROMPT))
        scheduling = second.scheduler._scheduling
        until(lambda: second.scheduler.get_num_new_matched_tokens(request, 0)[0] is None and scheduling._stages)
        agent.close()
        assert second.matched(request) == MISS


def test_a_request_that_ends_while_it_waits_gives_its_room_back(agent, first):
    with engine(agent.config.socket, seed=2, **LAYERWISE) as second:
        mine = second.workers[0]._layers
        free = mine._rows.num_free
        request = FakeRequest("b", list(PROMPT))
        assert second.matched(request) == (HIT, False)
        assert mine._rows.num_free == free - 4
        second.finish(request)
        second.step(Step())
        assert mine._rows.num_free == free


def test_what_finds_no_room_is_saved_whole_and_staged_in_part(agent, monkeypatch):
    with engine(agent.config.socket) as sample:
        size = sample.bytes_of(0).nbytes
    monkeypatch.setattr(layers, "_STAGING_BYTES", 3 * size)
    with engine(agent.config.socket, **LAYERWISE) as one:
        one.compute(FakeRequest("a", list(PROMPT)), BLOCKS)
        with engine(agent.config.socket, seed=2, **LAYERWISE) as second:
            assert second.matched(FakeRequest("b", list(PROMPT))) == (3 * BLOCK_SIZE, False)


@pytest.mark.parametrize(
    ("changes", "specs"),
    [
        ({"mla": True}, ()),
        ({}, (FullAttentionSpec(), FullAttentionSpec())),
        ({}, (SlidingWindowSpec(8),)),
    ],
)
def test_models_that_cannot_be_moved_so_are_refused_by_name(changes, specs):
    with stubbed_vllm() as module, pytest.raises(ValueError, match=r"^kv_connector_extra_config\.layerwise"):
        module.EMSConnector(
            vllm_config("x", **LAYERWISE, **changes), KVConnectorRole.SCHEDULER, kv_cache_config(*specs)
        )


def test_cuda_graphs_leave_room_for_layers():
    with stubbed_vllm() as module:
        assert module.EMSConnector.requires_piecewise_for_cudagraph({"layerwise": True})
        assert not module.EMSConnector.requires_piecewise_for_cudagraph({})


# Delayed copies


class WouldWaitError(Exception):
    pass


class HeldSide(Side):
    """A side that copies only when told to. A caller that would have to wait for a copy gets WouldWaitError."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.held: list[tuple[Callable[[], None], Future[Any]]] = []
        self.waited: list[Future[Any]] = []

    def begin(self, copy: Callable[[], None]) -> "Future[Any]":
        self.held.append((copy, Future()))
        return self.held[-1][1]

    def join(self, copying: "Future[Any]") -> None:
        if not copying.done():
            raise WouldWaitError

    def wait(self, copying: "Future[Any]") -> None:
        super().wait(copying)
        self.waited.append(copying)

    def do(self, count: int) -> None:
        for copy, future in self.held[:count]:
            copy()
            future.set_result(None)
        del self.held[:count]


def test_a_layer_is_waited_for_alone(agent, first):
    with engine(agent.config.socket, seed=2, **LAYERWISE) as second:
        request = FakeRequest("b", list(PROMPT))
        assert second.matched(request) == (HIT, False)
        worker = second.workers[0]
        side = worker._layers._side = HeldSide()
        second.allocate(request, LOADED, HIT)
        metadata = second.scheduler.build_connector_meta(Step(new=[(request, LOADED, HIT)], counts={"b": 1}).output())
        worker.bind_connector_metadata(metadata)
        worker.start_load_kv(None)
        with pytest.raises(WouldWaitError):
            worker.wait_for_layer_load("layer0")
        side.do(1)
        worker.wait_for_layer_load("layer0")
        for name in ("layer1", "a layer that is not in the cache"):
            with pytest.raises(WouldWaitError):
                worker.wait_for_layer_load(name)
        got, truth = second.bytes_of(9), first.bytes_of(0)
        assert (got[0] == truth[0]).all(), "the first layer is there"
        assert not (got[1] == truth[1]).any(), "the second is not"
        side.do(1)
        worker.wait_for_layer_load("layer1")
        assert (second.bytes_of(9) == truth).all()


def test_a_save_begins_with_its_first_layer_and_is_stored_when_all_are_there(agent):
    with engine(agent.config.socket, **LAYERWISE) as one:
        request, worker = FakeRequest("a", list(PROMPT)), one.workers[0]
        side = worker._layers._side = HeldSide()
        one.allocate(request, BLOCKS, 0)
        output = Step(new=[(request, BLOCKS, 0)], counts={"a": len(PROMPT)}).output()
        worker.bind_connector_metadata(one.scheduler.build_connector_meta(output))
        worker.start_load_kv(None)
        worker.save_kv_layer("layer0", one.caches[0]["layer0"], None)
        assert len(side.held) == 1
        side.do(1)
        worker.wait_for_save()
        assert len(side.held) == 1, "a layer of which nobody said that it was computed"
        assert not agent.node.pools() or agent.node.pools()[0].usage()["blocks"] == 0
        assert one.scheduler.request_finished(request, [])[0] is True
        assert worker.get_transfer_results({"a"}).finished_sending == set(), "its blocks are still read"
        side.do(1)
        until(lambda: worker.get_transfer_results(set()).finished_sending == {"a"})
        assert len(side.waited) == 2, "both layers were there before it was stored"
        assert agent.node.pools()[0].usage()["blocks"] == 4


# CUDA


class FakeCuda:
    """The streams and events of torch.cuda, with a log of their calls."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = SimpleNamespace(name="engine", wait_event=lambda event: self.log.append(f"engine waits {event}"))

    def Stream(self, device: Any) -> Any:
        return SimpleNamespace(name="side", wait_event=lambda event: self.log.append(f"side waits {event}"))

    def current_stream(self, device: Any) -> Any:
        return self.current

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.log.append(f"on {stream.name}")
        yield
        self.log.append("off")

    def Event(self) -> Any:
        log = self.log

        class Event:
            name = "unrecorded"

            def record(self, stream: Any) -> None:
                self.name = f"{stream.name}{sum(line.startswith(f'record {stream.name}') for line in log)}"
                log.append(f"record {self.name}")

            def synchronize(self) -> None:
                log.append(f"host waits {self.name}")

            def query(self) -> bool:
                return f"host waits {self.name}" in log

            def __str__(self) -> str:
                return self.name

        return Event()


def test_on_a_device_copies_follow_the_engines_stream_on_one_of_their_own():
    cuda = FakeCuda()
    side = Side(torch.device("cpu"), cuda)
    one = side.begin(lambda: cuda.log.append("copy one"))
    one.result()
    assert cuda.log == ["record engine0", "on side", "side waits engine0", "copy one", "record side0", "off"]
    cuda.log.clear()
    side.join(one)
    assert cuda.log == ["engine waits side0"], "the host goes on"
    assert not side.is_over(one)
    side.wait(one)
    assert cuda.log[-1] == "host waits side0"
    assert side.is_over(one)
    side.close()


def test_a_copy_that_fails_is_no_silent_one():
    side = Side(torch.device("cpu"))

    def fail() -> None:
        raise RuntimeError("the device is gone")

    failed = side.begin(fail)
    for ask in (side.join, side.wait):
        with pytest.raises(RuntimeError, match="the device is gone"):
            ask(failed)
    assert side.is_over(failed)
    side.close()


# Rows


def test_rows_lie_together_and_come_back():
    rows, source = Rows(20), random.Random(3)
    taken: list[range] = []
    for _ in range(500):
        if taken and source.random() < 0.5:
            rows.give_back(taken.pop(source.randrange(len(taken))))
        else:
            wanted = source.randint(1, 8)
            free = set(range(20)) - set().union(*taken)
            runs = [n for n in range(1, wanted + 1) if any(set(range(i, i + n)) <= free for i in range(20))]
            taken.append(rows.take(wanted))
            assert len(taken[-1]) == max(runs, default=0)
        held = [row for some in taken for row in some]
        assert len(held) == len(set(held)) == 20 - rows.num_free
