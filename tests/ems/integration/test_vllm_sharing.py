"""EMSConnector besides moving blocks: adapters, ranks of MLA, events, statistics, and handing a prompt over."""

import itertools
import os
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from ems.integration.adapters import Adapters
from ems.integration.stored import Stored, StoredBlock
from kvloom.pool.agent import Agent
from tests.support.pool.agents import blocks_of
from tests.support.pool.faults import AgentProcess
from tests.support.pool.stores import emptied
from tests.support.vllm.engine import Engine, engine
from tests.support.vllm.stub import BLOCK_SIZE, FakeRequest, Step, stubbed_vllm
from tests.support.waiting import until

PROMPT = list(range(100, 100 + 4 * BLOCK_SIZE + 1))  # four full blocks and a token
BLOCKS = [0, 1, 2, 3, 4]
_numbers = itertools.count()
HIT, MISS = (4 * BLOCK_SIZE, True), (0, False)


def adapter(path: Any, number: int = 1, name: str = "a", **changes: Any) -> SimpleNamespace:
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(path), **changes)


def adapter_folder(parent: Any, name: str, content: bytes) -> Any:
    folder = parent / name
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(content)
    return folder


def computed(running: Engine, **changes: Any) -> None:
    """Computes PROMPT for a request, and saves its blocks."""
    request = FakeRequest("a", list(PROMPT), **changes)
    running.matched(request)  # waits until the adapter's name is known
    running.compute(request, BLOCKS)


def asked(running: Engine, **changes: Any) -> tuple[int, bool]:
    return running.matched(FakeRequest(f"asks {next(_numbers)}", list(PROMPT), **changes))


# Adapters


def test_requests_of_one_adapter_share_by_its_content(agent, tmp_path):
    mine, copy = (adapter_folder(tmp_path, name, b"weights") for name in ("mine", "copy"))
    other = adapter_folder(tmp_path, "other", b"others!")
    with engine(agent.config.socket) as one, engine(agent.config.socket, seed=2) as two:
        computed(one, lora_request=adapter(mine))
        assert asked(two, lora_request=adapter(copy, 7, "another name")) == HIT
        assert asked(two, lora_request=adapter(other, 8)) == MISS
        assert asked(two) == MISS, "nor the model without adapter"
        request = FakeRequest("b", list(PROMPT), lora_request=adapter(copy, 7))
        assert two.matched(request) == HIT
        assert two.load(request, [9, 8, 7, 6, 5], HIT[0]) == set()


def test_an_adapter_that_changed_under_its_id_is_not_shared(agent, tmp_path, caplog):
    folder = adapter_folder(tmp_path, "mine", b"weights")
    with engine(agent.config.socket) as one:
        computed(one, lora_request=adapter(folder))
        assert asked(one, lora_request=adapter(folder)) == HIT
        (folder / "adapter_model.safetensors").write_bytes(b"changed")
        os.utime(folder / "adapter_model.safetensors", ns=(1, 1))
        assert asked(one, lora_request=adapter(folder)) == MISS
        computed(one, lora_request=adapter(folder))
        assert asked(one, lora_request=adapter(folder)) == MISS
        assert "adapter a: its files changed since it was first used; it is not shared" in caplog.text
    with engine(agent.config.socket) as fresh:
        assert asked(fresh, lora_request=adapter(folder)) == MISS, "nothing of the old weights"
        assert asked(fresh, lora_request=adapter(folder, 2, load_inplace=True)) == MISS


def test_a_request_waits_for_its_adapters_name(tmp_path):
    folder, may_go = adapter_folder(tmp_path, "mine", b"weights"), threading.Event()
    adapters = Adapters(lambda path: str(may_go.wait(20)) + path)
    future = adapters.look(adapter(folder))
    assert future is not None
    assert not future.done()
    may_go.set()
    assert future.result(20) == f"True{folder}"
    assert adapters.look(adapter(folder)) is future
    assert adapters.look(adapter("/does/not/exist", 2)) is None
    adapters.close()


# Ranks of MLA


def test_mla_is_saved_by_one_rank_and_loaded_by_all(agent):
    with engine(agent.config.socket, world_size=2, mla=True) as two:
        two.compute(FakeRequest("a", list(PROMPT)), BLOCKS)
        counts = agent.node.pools()[0].counts
        assert (counts["save_stored"], counts["save_duplicate"] + counts["save_conflict"]) == (4, 0)
        with engine(agent.config.socket, seed=7, world_size=2, mla=True) as other:
            request = FakeRequest("b", list(PROMPT))
            assert other.matched(request) == HIT
            assert other.load(request, [5, 6, 7, 8, 9], HIT[0]) == set()
            for rank in range(2):
                assert (other.bytes_of(6, rank) == two.bytes_of(1, 0)).all()


# Events and statistics


def events_of(running: Engine) -> list[SimpleNamespace]:
    return list(running.scheduler.take_events())


@pytest.mark.parametrize("world_size", [1, 2])
def test_blocks_are_told_once_when_all_ranks_have_saved_them(agent, world_size):
    with engine(agent.config.socket, world_size=world_size, events=True) as running:
        request = FakeRequest("a", list(PROMPT))
        running.compute(request, BLOCKS)
        told = until(lambda: running.step(Step()) and events_of(running))
        assert [event.block_hashes for event in told] == [[each] for each in request.block_hashes]
        assert [event.parent_block_hash for event in told] == [None, *request.block_hashes[:3]]
        assert [event.token_ids for event in told] == [PROMPT[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE] for i in range(4)]
        assert {(event.medium, event.block_size, event.lora_name) for event in told} == {("EMS", BLOCK_SIZE, None)}
        running.step(Step())
        assert events_of(running) == []


def test_without_events_nothing_is_kept_for_them(agent):
    with engine(agent.config.socket) as running:
        running.compute(FakeRequest("a", list(PROMPT)), BLOCKS)
        running.step(Step())
        assert events_of(running) == []


def test_reports_of_ranks_are_counted_and_forgotten_in_time():
    stored = Stored()
    for name in range((1 << 16) + 1):
        stored.expect(name, StoredBlock(name, None, ()))
    stored.report({0: 1, 1: 1, 2: 2, 99999999: 1}, num_ranks=2)
    assert stored.take() == [StoredBlock(2, None, ())], "the first was too old, the second lacks a rank"
    stored.report({1: 1}, num_ranks=2)
    assert stored.take() == [StoredBlock(1, None, ())]


def test_statistics_are_summed_and_reach_prometheus(agent):
    with engine(agent.config.socket) as one, engine(agent.config.socket, seed=2) as two:
        one.compute(FakeRequest("a", list(PROMPT)), BLOCKS)
        request = FakeRequest("b", list(PROMPT))
        two.matched(request)
        two.load(request, [9, 8, 7, 6, 5], HIT[0])
        saved, loaded, looked = (
            part.get_kv_connector_stats() for part in (one.workers[0], two.workers[0], two.scheduler)
        )
        size = one.bytes_of(0).nbytes
        assert (saved.data["saved_blocks"], saved.data["saved_bytes"]) == (4, 4 * size)
        assert (loaded.data["loaded_blocks"], loaded.data["loaded_bytes"]) == (4, 4 * size)
        assert looked.data == {"lookups": 1, "lookup_blocks": 4, "hit_blocks": 4}
        assert two.scheduler.get_kv_connector_stats() is None, "told once"
        whole = saved.aggregate(loaded).aggregate(looked)
        assert whole.reduce()["hit_blocks"] == 4
        assert not whole.is_empty()
    with stubbed_vllm() as module:
        made: dict[str, Any] = {}
        counts: Counter[Any] = Counter()

        def counter(name: str, documentation: str, labelnames: list[str]) -> Any:
            assert documentation
            made[name] = labelnames
            return SimpleNamespace(
                labels=lambda *labels: SimpleNamespace(inc=lambda value: counts.update({(name, *labels): value}))
            )

        metrics = module.EMSConnector.build_prom_metrics(None, {"counter": counter}, ["model"], {3: ["m"]})
        metrics.observe({**whole.data, "unknown": 1}, 3)
        assert counts[("vllm:ems_saved_blocks", "m")] == 4
        assert set(made) > {name for name, *_labels in counts}
        assert module.EMSConnector.build_kv_connector_stats({"lookups": 1}).data == {"lookups": 1}
        assert module.EMSConnector.build_kv_connector_stats().is_empty()


def test_what_fails_is_counted(agent, tmp_path):
    with engine(tmp_path / "nobody.sock", extra={"timeout_ms": 50}) as alone:
        alone.compute(FakeRequest("a", list(PROMPT)), BLOCKS)
        assert alone.workers[0].get_kv_connector_stats().data == {"unsaved_blocks": 4}
    with engine(agent.config.socket) as one, engine(agent.config.socket, seed=2) as two:
        one.compute(FakeRequest("a", list(PROMPT)), BLOCKS)
        request = FakeRequest("b", list(PROMPT))
        assert two.matched(request) == HIT
        emptied(agent.node.pools()[0])
        assert two.load(request, [9, 8, 7, 6, 5], HIT[0]) == {9, 8, 7, 6}
        assert two.workers[0].get_kv_connector_stats().data["failed_blocks"] == 4


# Handing a prompt over


def test_a_prefill_says_what_it_saves_and_the_decode_waits_for_it(agent: Agent):
    with engine(agent.config.socket) as prefill, engine(agent.config.socket, seed=2) as decode:
        request = FakeRequest("a", list(PROMPT), kv_transfer_params={"do_remote_decode": True})
        prefill.allocate(request, BLOCKS, 0)
        late = prefill.scheduler.build_connector_meta(
            Step(new=[(request, BLOCKS, 0)], counts={"a": len(PROMPT)}).output()
        )
        is_held, promise = prefill.scheduler.request_finished(request, [])
        assert (is_held, promise) == (True, {"ems_num_tokens": 4 * BLOCK_SIZE})
        follower = FakeRequest("b", list(PROMPT), kv_transfer_params=promise)
        for _ in range(20):
            assert decode.scheduler.get_num_new_matched_tokens(follower, 0) == (None, False), "nothing is there yet"
        worker = prefill.workers[0]
        worker.bind_connector_metadata(late)
        worker.wait_for_save()
        assert decode.matched(follower) == HIT
        plain = FakeRequest("c", list(PROMPT))
        prefill.compute(plain, BLOCKS)
        assert prefill.scheduler.request_finished(plain, []) == (False, None), "only who asks is told"


@pytest.mark.parametrize("promise", [4 * BLOCK_SIZE, 10**9, "many", None])
def test_a_promise_that_is_not_kept_costs_its_time_only(agent, promise):
    with engine(agent.config.socket, extra={"handover_ms": 1}) as decode:
        follower = FakeRequest("b", list(PROMPT), kv_transfer_params={"ems_num_tokens": promise})
        assert decode.matched(follower) == MISS


# Loads that fail


def test_an_agent_that_stands_still_costs_a_load_its_deadline(tmp_path):
    """Found blocks that do not arrive in time are reported with the request, and the pool is not asked again."""
    with AgentProcess(tmp_path / "ems.sock") as agent, engine(agent.socket, extra={"timeout_ms": 2000}) as one:
        one.compute(FakeRequest("a", list(PROMPT)), BLOCKS)
        until(lambda: asked(one) == HIT)
        request = FakeRequest("b", list(PROMPT))
        assert one.matched(request) == HIT
        before = [one.bytes_of(block).clone() for block in (9, 8, 7, 6)]
        with agent.stopped():
            assert one.load(request, [9, 8, 7, 6, 5], HIT[0]) == {9, 8, 7, 6}
            assert all((one.bytes_of(block) == old).all() for block, old in zip((9, 8, 7, 6), before, strict=True))
            assert one.matched(request) == MISS, "a request that was let down is not sent again"
            one.compute(FakeRequest("c", [7, *PROMPT]), BLOCKS)
        until(lambda: asked(one) == HIT)


def test_lookups_wait_for_each_other_within_their_deadlines(tmp_path, monkeypatch):
    """Those that came while the pool stood still do not each try for as long as the first."""
    with AgentProcess(tmp_path / "ems.sock") as agent, engine(agent.socket, extra={"timeout_ms": 500}) as one:
        lookup, calls = one.scheduler._scheduling.lookup, []
        caching = lookup._sessions[0][0].caching
        exists = caching.exists
        monkeypatch.setattr(caching, "exists", lambda *args: (calls.append(args), exists(*args))[1])
        with agent.stopped():
            begun = [lookup.begin([[i]], 0, BLOCK_SIZE) for i in range(40)]
            assert {each.result() for each in begun if each is not None} == {0}
        assert 0 < len(calls) < 20


def test_several_loads_fail_alone(agent):
    """Of two requests in flight, the damaged one fails; a block with wrong bytes is never written."""
    with engine(agent.config.socket) as one, engine(agent.config.socket, seed=2) as two:
        other = [7 + token for token in PROMPT]
        one.compute(FakeRequest("a", list(PROMPT)), BLOCKS)
        one.compute(FakeRequest("b", list(other)), [5, 6, 7, 8, 9])
        pool = agent.node.pools()[0]
        damaged = blocks_of(pool)[0]
        pool.view(damaged.offset, damaged.length)[3] ^= 1
        requests = [FakeRequest("c", list(PROMPT)), FakeRequest("d", list(other))]
        tables = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
        for request, blocks in zip(requests, tables, strict=True):
            assert two.matched(request) == HIT
            two.allocate(request, blocks, HIT[0])
        failed: set[int] = set()
        received: set[str] = set()

        def are_over() -> bool:
            _sent, got, lost = two.step(Step())
            received.update(got)
            failed.update(lost)
            return received == {"c", "d"}

        until(are_over)
        assert failed == {0, 1, 2, 3}
        assert (two.bytes_of(5) == one.bytes_of(5)).all()
        assert (two.matched(requests[0]), two.matched(requests[1])) == (MISS, HIT)
