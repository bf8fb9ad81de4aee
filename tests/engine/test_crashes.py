"""A dead rank is only a pause: running requests continue with the same tokens; requests that kill ranks are ended."""

from dataclasses import replace
from itertools import count

import pytest

from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import BadRequest
from kvloom.contract.messages import AdapterInfo
from kvloom.contract.request import Delta, FinishReason, Request
from kvloom.engine.link.executor import RankDied
from kvloom.rank.fake import fake_answer
from tests.support.engine.crashes import (
    ENGINES,
    GREEDY,
    MIXED,
    answers,
    at_steps,
    mortal_engine,
    prompt,
    run_through,
    said,
    step,
    truth,
)
from tests.support.engine.engines import tokens_of
from tests.support.models.adapters import TINY_SHAPES, make_adapter

# -- the same tokens


@pytest.mark.parametrize("fields", ENGINES.values(), ids=ENGINES)
def test_a_rank_that_dies_at_any_step_changes_no_answer(fields):
    want = answers(**fields)
    assert [len(values[3]) for values in want.values()].count(1) == 2, "prompt log-probabilities are told once"
    for dying in count(1):
        engine, executor = mortal_engine(at_steps({dying}), **fields)
        found = run_through(engine, executor, *MIXED)
        assert {name: said(deltas) for name, deltas in found.items()} == want, dying
        stats = engine.stats()
        assert stats.num_free_blocks == stats.num_blocks
        assert stats.num_free_host_blocks == stats.num_host_blocks
        if not stats.total_crashes:  # all requests ended before the crash
            assert dying > 9
            return
        assert (stats.total_crashes, stats.total_guilty) == (1, 0)
        assert stats.total_resumed > 0


def test_the_engines_of_these_tests_do_what_they_are_named_after():
    """The engines really swap, preempt and draft, so that crashes meet each of these."""
    found = {}
    for name, fields in ENGINES.items():
        engine, executor = mortal_engine(**fields)
        run_through(engine, executor, *MIXED)
        found[name] = engine.stats()
    assert found["swapping"].total_swapped > 0
    assert found["few blocks, chunks"].total_preemptions > found["few blocks, chunks"].total_swapped == 0
    assert found["guesses, no cache"].total_draft_tokens > 0


def test_a_rank_that_dies_again_and_again_changes_no_answer():
    """This holds as long as the requests that were running at a crash have been cleared before the next."""
    want = answers(max_batch=16)
    for every in (47, 61):
        engine, executor = mortal_engine(at_steps(range(every, 10_000, every)), max_batch=16)
        found = run_through(engine, executor, *MIXED)
        assert {name: said(deltas) for name, deltas in found.items()} == want


def test_a_rank_that_is_found_dead_between_two_steps_is_a_pause_too():
    engine, executor = mortal_engine(max_batch=16)
    request = Request("a", prompt(9), replace(GREEDY, max_tokens=20))
    engine.add(request)
    found: list[Delta] = []
    while engine.has_work:
        found += step(engine, executor)
        if not any(live.seq.is_suspect for live in engine._seqs.values()):
            executor.die()
    assert tokens_of(found) == truth(request, 20)
    assert engine.stats().total_crashes == 5  # a suspect is cleared after 2, 4, 8 and 16 tokens in turn


@pytest.mark.parametrize("is_late", [False, True])
def test_tokens_of_the_last_step_are_told_at_once_and_not_twice(is_late):
    engine, executor = mortal_engine()
    request = Request("a", prompt(9), GREEDY)
    engine.add(request)
    told = [delta for _ in range(3) for delta in engine.step()]
    executor.die()
    with pytest.raises(Exception, match="dead"):
        engine.start_step()
    told += engine.suspend()
    assert tokens_of(told) == truth(request, 3)
    if is_late:  # the rank stays away; a request that is aborted meanwhile gets its last delta
        engine.abort("a")
        engine.add(Request("b", prompt(4), GREEDY))
        assert [delta.finish_reason for delta in engine.take_deltas()] == [FinishReason.ABORT]
    executor.restart()
    assert engine.resume({}) == []
    found = run_through(engine, executor)
    last = Request("b", prompt(4), GREEDY) if is_late else request
    assert tokens_of(([] if is_late else told) + found[last.id]) == truth(last, 9)


def test_the_guilty_is_told_its_last_tokens_before_its_end():
    engine, executor = mortal_engine()
    request = Request("a", prompt(9), GREEDY)
    engine.add(request)
    executor.die()
    assert step(engine, executor) == []
    engine.step()  # the suspect runs alone; its token has not been delivered yet
    executor.die()
    with pytest.raises(Exception, match="dead"):
        engine.start_step()
    told = engine.suspend()
    assert [delta.finish_reason for delta in told] == [None, FinishReason.ERROR]
    assert tokens_of(told) == truth(request, 1)


def test_what_was_cached_for_a_prompt_at_first_is_what_is_told_after_a_crash_too():
    engine, executor = mortal_engine(at_steps({4}))
    request = Request("a", prompt(17), GREEDY)
    first = run_through(engine, executor, Request("before", request.prompt_ids, replace(GREEDY, max_tokens=1)))
    assert first["before"][-1].num_cached_tokens == 0
    deltas = run_through(engine, executor, request)["a"]
    assert {delta.num_cached_tokens for delta in deltas} == {16}
    stats = engine.stats()
    assert (stats.total_cached_tokens, stats.total_resumed) == (16, 1)
    assert stats.total_recomputed_tokens == 18  # the prompt and the first token of the answer


def test_nothing_of_the_dead_rank_is_believed_and_the_outer_tier_helps():
    request = Request("a", prompt(17), GREEDY)
    engine, executor = mortal_engine(at_steps({5}), stored := {})
    found = run_through(engine, executor, request)
    assert tokens_of(found["a"]) == truth(request, 9)
    stats = engine.stats()
    assert stats.total_tier_loaded_blocks >= 4
    assert 0 < stats.total_recomputed_tokens < 8
    assert stored


@pytest.mark.parametrize("fields", [{"max_batch": 16}, ENGINES["few blocks, chunks"]], ids=["plain", "few blocks"])
def test_loads_and_saves_that_were_under_way_are_begun_again(fields):
    requests = [request for request in MIXED if not (request.params.grammar or request.pooling)]
    engine, executor = mortal_engine(stored={}, **fields)
    want = {name: said(deltas) for name, deltas in run_through(engine, executor, *requests).items()}
    for dying in range(1, 9):
        kills = at_steps({dying}, lambda batch: bool(batch.loads or batch.saves))
        engine, executor = mortal_engine(kills, {}, **fields)
        found = run_through(engine, executor, *requests)
        assert {name: said(deltas) for name, deltas in found.items()} == want


# -- adapters


def test_adapters_are_read_again_and_those_that_are_leaving_as_long_as_they_are_needed(tmp_path):
    engine, executor = mortal_engine(at_steps({3}))
    first, second = (engine.adapters.load(str(make_adapter(tmp_path / str(i), TINY_SHAPES, i))) for i in range(2))
    requests = [Request(f"r{adapter.id}", prompt(9), GREEDY, adapter=adapter.id) for adapter in (first, second)]
    for request in requests:
        engine.add(request)
    engine.adapters.unload(first.id)
    found = run_through(engine, executor)
    for request, adapter in zip(requests, (first, second), strict=True):
        want = fake_answer(request.prompt_ids, GREEDY, 0, 9, adapter.info.digest)
        assert tokens_of(found[request.id]) == want
    assert engine.adapters.reload() == {}
    assert executor.unload_adapter(first.id) is None
    with pytest.raises(Exception, match="unloaded"):
        engine.add(replace(requests[0], id="late"))


@pytest.mark.parametrize(
    ("is_gone", "words"),
    [(True, "lost when the model restarted: adapter_config.json cannot be read"), (False, "its files have changed")],
)
def test_a_request_whose_adapter_is_not_what_it_was_ends_with_the_reason(tmp_path, is_gone, words):
    folder = make_adapter(tmp_path / "one", TINY_SHAPES, 1)
    engine, executor = mortal_engine()
    adapter = engine.adapters.load(str(folder))
    with_it, without = Request("a", prompt(9), GREEDY, adapter=adapter.id), Request("b", prompt(9), GREEDY)
    engine.add(with_it)
    engine.add(without)
    found = step(engine, executor) + step(engine, executor)
    if is_gone:
        (folder / "adapter_config.json").unlink()
    else:
        make_adapter(folder, TINY_SHAPES, 2)
    executor.die()
    found += step(engine, executor)
    for deltas in run_through(engine, executor).values():
        found += deltas
    mine = [delta for delta in found if delta.request_id == "a"]
    assert mine[-1].finish_reason is FinishReason.ERROR
    assert words in (mine[-1].error or "")
    assert tokens_of([delta for delta in found if delta.request_id == "b"]) == truth(without, 9)


@pytest.mark.parametrize("is_gone", [True, False])
def test_it_ends_so_where_the_rank_dies_again_while_adapters_are_read(tmp_path, is_gone):
    folders = [make_adapter(tmp_path / str(i), TINY_SHAPES, i) for i in range(2)]
    engine, executor = mortal_engine()
    first, second = (engine.adapters.load(str(folder)) for folder in folders)
    for name, adapter in (("a", first), ("b", second)):
        engine.add(Request(name, prompt(9), GREEDY, adapter=adapter.id))
    found = step(engine, executor) + step(engine, executor)
    if is_gone:
        (folders[0] / "adapter_config.json").unlink()
    else:
        make_adapter(folders[0], TINY_SHAPES, 2)
    executor.die()
    with pytest.raises(RankDied):
        engine.step()
    found += engine.suspend()
    executor.restart()
    load = executor.load_adapter

    def die_at_second(id: int, path: str) -> AdapterInfo:
        if id == second.id:
            executor.die()
        return load(id, path)

    executor.load_adapter = die_at_second  # type: ignore[method-assign]
    with pytest.raises(RankDied):
        engine.adapters.reload()
    executor.load_adapter = load  # type: ignore[method-assign]
    found += engine.suspend()
    executor.restart()
    found += engine.resume(engine.adapters.reload())
    for deltas in run_through(engine, executor).values():
        found += deltas
    ends = {delta.request_id: delta.error for delta in found if delta.finish_reason is not None}
    assert "lost when the model restarted" in (ends["a"] or "")
    assert tokens_of([delta for delta in found if delta.request_id == "b"]) == fake_answer(
        prompt(9), GREEDY, 0, 9, second.info.digest
    )


def test_a_request_that_no_longer_fits_ends_with_the_reason():
    engine, executor = mortal_engine()
    engine.add(long := Request("long", prompt(40), replace(GREEDY, max_tokens=20)))
    engine.add(short := Request("short", prompt(9), GREEDY))
    found = step(engine, executor)
    executor.die()
    smaller, _ = mortal_engine(num_blocks=10)
    executor._make = lambda: smaller._executor._runner
    found += step(engine, executor)
    for deltas in run_through(engine, executor).values():
        found += deltas
    last = [delta for delta in found if delta.request_id == long.id][-1]
    assert last.error == "the model came back with room for 40 tokens, too few for this request"
    assert tokens_of([delta for delta in found if delta.request_id == "short"]) == truth(short, 9)


@pytest.mark.parametrize("given", [-1.0, 86_401.0, float("nan"), float("inf")])
def test_patience_has_bounds(given: float):
    with pytest.raises(BadRequest, match="crash_patience_s: must be between 0 and 86400, got "):
        EngineConfig(backend="fake", crash_patience_s=given)
