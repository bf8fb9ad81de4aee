"""An engine in another process: kvloom.vllm over a fake vLLM whose tokens are known (tests/support/vllm/fake)."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import BadRequest, GenerationFailed, ModelError, ServingError, Unavailable
from kvloom.contract.request import Delta, FinishReason, Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.hosted.engine import GUILTY
from kvloom.engine.hosted.resumable import OTHERWISE
from kvloom.engine.thread import EngineThread
from kvloom.rank.opening import model_tokenizer
from kvloom.vllm.opening import check, open_engine
from tests.support.models.adapters import TINY_SHAPES, make_adapter
from tests.support.models.byte_folder import make_byte_folder
from tests.support.waiting import WAIT_S

FAKE = Path(__file__).resolve().parents[2] / "support/vllm/fake"
SOURCE = Path(__file__).resolve().parents[3] / "src"
PROMPT = tuple(b"What comes after this?")
GREEDY = SamplingParams(temperature=0, max_tokens=150)
SEEDED = SamplingParams(temperature=0.8, seed=7, max_tokens=150)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_byte_folder(tmp_path_factory.mktemp("hosted") / "m")


@pytest.fixture(autouse=True)
def _fake_vllm(monkeypatch):
    monkeypatch.syspath_prepend(str(FAKE))
    monkeypatch.setenv("PYTHONPATH", f"{FAKE}:{SOURCE}")


def with_engine(folder: Path, body: Callable[[EngineThread], Awaitable[None]], **fields: object) -> None:
    async def main() -> None:
        config = EngineConfig(model=str(folder), backend="vllm", **fields)
        engine = open_engine(config, lambda: model_tokenizer(config.model))
        engine.start(asyncio.get_running_loop())
        try:
            await asyncio.wait_for(body(engine), WAIT_S)
        finally:
            await asyncio.to_thread(engine.close)

    asyncio.run(main())


async def deltas_of(engine: EngineThread, request: Request) -> list[Delta]:
    async with aclosing(engine.stream(request)) as stream:
        return [delta async for delta in stream]


async def tokens_of(engine: EngineThread, name: str, params: SamplingParams) -> tuple[list[int], str]:
    found = await deltas_of(engine, Request(name, PROMPT, params))
    assert [delta.finish_reason is not None for delta in found].count(True) == 1
    assert found[-1].finish_reason is FinishReason.LENGTH
    return [token for delta in found for token in delta.token_ids], "".join(delta.text for delta in found)


def pid(engine: EngineThread) -> int:
    return engine._executor.pids[0]


MIX = [GREEDY, SEEDED, replace(GREEDY, frequency_penalty=0.5), replace(SEEDED, seed=8, logprobs=2), GREEDY, SEEDED]


async def all_answers(engine: EngineThread, prefix: str) -> list[tuple[list[int], str]]:
    return await asyncio.gather(*(tokens_of(engine, f"{prefix}{i}", params) for i, params in enumerate(MIX)))


def test_answers_go_on_in_the_next_process_as_if_nothing_had_happened(folder):
    async def body(engine: EngineThread) -> None:
        undisturbed = await all_answers(engine, "a")
        running = asyncio.ensure_future(all_answers(engine, "b"))
        while engine.stats().total_output_tokens < 150 * len(MIX) + 100:
            await asyncio.sleep(0.002)
        os.kill(pid(engine), signal.SIGKILL)
        assert await running == undisturbed
        stats = engine.stats()
        assert (stats.total_crashes, stats.total_restarts, stats.total_resumed) == (1, 1, len(MIX))
        while engine.stats().total_finished < 2 * len(MIX):
            await asyncio.sleep(0.002)
        assert (engine.stats().num_running, engine.stats().num_waiting) == (0, 0)

    with_engine(folder, body)


def test_an_answer_that_is_not_made_again_alike_ends_with_an_error_that_says_so(folder, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM_UNSTABLE", "1")

    async def body(engine: EngineThread) -> None:
        running = [asyncio.ensure_future(tokens_of(engine, f"r{i}", p)) for i, p in enumerate((GREEDY, SEEDED))]
        while engine.stats().total_output_tokens < 60:
            await asyncio.sleep(0.002)
        os.kill(pid(engine), signal.SIGKILL)
        greedy, seeded = await asyncio.gather(*running, return_exceptions=True)
        assert len(greedy[0]) == 150
        assert isinstance(seeded, GenerationFailed)
        assert str(seeded) == OTHERWISE
        assert len((await tokens_of(engine, "later", SEEDED))[0]) == 150

    with_engine(folder, body)


def test_what_the_process_dies_of_twice_ends_and_nobody_else_does(folder, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM_KILLER", "33")

    async def body(engine: EngineThread) -> None:
        alone = await tokens_of(engine, "alone", SEEDED)
        others = [asyncio.ensure_future(tokens_of(engine, f"o{i}", SEEDED)) for i in range(3)]
        killer = asyncio.ensure_future(deltas_of(engine, Request("killer", (*PROMPT, 33), GREEDY)))
        while not killer.done() and engine.stats().total_crashes <= 2:
            await asyncio.sleep(0.002)
        assert killer.done()
        with pytest.raises(GenerationFailed, match=GUILTY):
            await killer
        assert await asyncio.gather(*others) == [alone] * 3
        assert engine.stats().total_guilty == 1

    with_engine(folder, body)


def test_a_process_that_hangs_is_restarted(folder):
    async def body(engine: EngineThread) -> None:
        whole = await tokens_of(engine, "a", GREEDY)
        running = asyncio.ensure_future(tokens_of(engine, "b", GREEDY))
        while engine.stats().total_output_tokens < 170:
            await asyncio.sleep(0.002)
        os.kill(pid(engine), signal.SIGSTOP)
        assert await running == whole
        assert engine.stats().total_restarts == 1

    with_engine(folder, body, step_timeout_s=3.0)  # far more than a step takes while the process runs


def test_a_process_that_dies_while_idle_is_replaced(folder):
    async def body(engine: EngineThread) -> None:
        os.kill(pid(engine), signal.SIGKILL)
        while not engine.stats().total_restarts:
            await asyncio.sleep(0.01)
        await tokens_of(engine, "a", GREEDY)

    with_engine(folder, body)


def test_who_is_not_waited_for_any_longer_ends_and_leaves_nothing(folder):
    async def body(engine: EngineThread) -> None:
        async with aclosing(engine.stream(Request("left", PROMPT, replace(GREEDY, max_tokens=1900)))) as stream:
            async for _ in stream:
                break
        told = Request("told", PROMPT, replace(GREEDY, max_tokens=1900))
        async with aclosing(engine.stream(told)) as stream:
            await anext(stream)
            engine.abort("told")
            assert [delta async for delta in stream][-1].finish_reason is FinishReason.ABORT
        while engine.stats().total_finished < 2:
            await asyncio.sleep(0.002)
        assert engine.stats().num_running == 0

    with_engine(folder, body)


def test_stop_strings_and_ends_are_the_servers_own(folder):
    async def body(engine: EngineThread) -> None:
        _, text = await tokens_of(engine, "a", GREEDY)
        stop = text[20:24]
        found = await deltas_of(engine, Request("b", PROMPT, replace(GREEDY, stop=(stop,))))
        assert "".join(delta.text for delta in found) == text[: text.index(stop)]
        assert (found[-1].finish_reason, found[-1].stop_reason) == (FinishReason.STOP, stop)
        first = found[0].token_ids[0]
        (last,) = await deltas_of(engine, Request("c", PROMPT, replace(GREEDY, stop_token_ids=(first,))))
        assert (last.finish_reason, last.stop_reason, last.num_cached_tokens) == (FinishReason.STOP, first, 16)
        (scored,) = await deltas_of(engine, Request("d", PROMPT, replace(GREEDY, max_tokens=0, prompt_logprobs=1)))
        assert scored.token_ids == ()
        assert [value and value.token_id for value in scored.prompt_logprobs] == [None, *PROMPT[1:]]

    with_engine(folder, body)


def test_sleep_ends_the_process_and_waking_starts_one(folder):
    async def body(engine: EngineThread) -> None:
        whole = await tokens_of(engine, "a", SEEDED)
        before = pid(engine)
        await engine.sleep()
        with pytest.raises(ProcessLookupError):
            os.kill(before, 0)
        with pytest.raises(Unavailable, match="asleep"):
            engine.open([Request("b", PROMPT, SEEDED)])
        await engine.wake(wants_same_weights=True)
        await engine.reset_prefix_cache(preempts=True)
        assert await tokens_of(engine, "c", SEEDED) == whole

    with_engine(folder, body)


def test_adapters_are_loaded_used_and_read_again_into_a_new_process(folder, tmp_path):
    path = make_adapter(tmp_path / "adapter", TINY_SHAPES)

    async def body(engine: EngineThread) -> None:
        adapter = await engine.load_adapter(str(path))
        plain = await deltas_of(engine, Request("a", PROMPT, GREEDY))
        adapted = await deltas_of(engine, Request("b", PROMPT, GREEDY, adapter=adapter.id))
        assert [d.token_ids for d in plain] != [d.token_ids for d in adapted]
        running = asyncio.ensure_future(deltas_of(engine, Request("c", PROMPT, GREEDY, adapter=adapter.id)))
        while engine.stats().total_output_tokens < 350:
            await asyncio.sleep(0.002)
        os.kill(pid(engine), signal.SIGKILL)
        assert [d.token_ids for d in await running] == [d.token_ids for d in adapted]
        with pytest.raises(BadRequest, match="lora_path"):
            await engine.load_adapter(str(tmp_path))
        engine.unload_adapter(adapter.id)
        await engine.reset_prefix_cache(preempts=False)  # answered after the unloading
        with pytest.raises(ServingError, match="the adapter was unloaded"):
            await deltas_of(engine, Request("d", PROMPT, GREEDY, adapter=adapter.id))

    with_engine(folder, body, plugin_options={"enable_lora": True})


def test_log_probabilities_of_given_tokens_and_of_the_best_are_right_beside_each_other(folder):
    """vLLM would mix them in one step, so requests of the two kinds take turns; others do not wait."""
    best, given = replace(GREEDY, logprobs=2, max_tokens=30), replace(GREEDY, logprobs=0, logprob_ids=(5, 9))
    kinds = [best, given, replace(given, max_tokens=2), best, GREEDY, replace(given, max_tokens=2), best]

    async def body(engine: EngineThread) -> None:
        left = asyncio.ensure_future(deltas_of(engine, Request("left", PROMPT, given)))
        asked = [deltas_of(engine, Request(f"r{i}", PROMPT, params)) for i, params in enumerate(kinds)]
        answers = [asyncio.ensure_future(each) for each in asked]
        await asyncio.sleep(0)
        left.cancel()
        for params, answer in zip(kinds, answers, strict=True):
            found = [value for delta in await answer for value in delta.logprobs or ()]
            told = [[value for _id, value in each.top] for each in found]
            wanted = [-6.0, -10.0] if params.logprob_ids else [-0.5, -1.0]
            assert told == [wanted] * (0 if params.logprobs is None else params.max_tokens)

    with_engine(folder, body)


def test_the_last_figures_are_taken_in_though_nobody_asks_again(folder):
    async def body(engine: EngineThread) -> None:
        for name in "abc":
            await deltas_of(engine, Request(name, PROMPT, replace(GREEDY, max_tokens=3)))
        while 'vllm:fake_things_total{model_name="m"} 3.0' not in engine.stats().engine_metrics:
            await asyncio.sleep(0.01)

    with_engine(folder, body, idle_release_s=0.3)


def test_an_adapter_is_refused_where_there_is_no_room_for_any(folder, tmp_path):
    async def body(engine: EngineThread) -> None:
        with pytest.raises(BadRequest, match="--vllm enable_lora=true makes room"):
            await engine.load_adapter(str(make_adapter(tmp_path / "adapter", TINY_SHAPES)))

    with_engine(folder, body)


REFUSED = [
    ({"weight_format": "w8a8"}, "weightFormat: has no effect with backend vllm"),
    ({"weight_cache": "off"}, "weightCache: has no effect"),
    ({"kv_dtype": "int8"}, "kvCacheDtype: has no effect"),
    ({"dtype": "float32"}, "dtype: has no effect"),
    ({"num_speculative_tokens": 2}, "numSpeculativeTokens: has no effect"),
    ({"draft_model": "d"}, "draftModel: has no effect with backend vllm: it is kvloom's"),
    ({"max_gap_s": 0.1}, "maxDecodeGap: has no effect"),
    ({"fair_token_s": 0.1}, "fairTokenUs: has no effect"),
    ({"run_ahead": False}, "runAhead: has no effect"),
    ({"device": "cuda"}, "deviceType: has no effect"),
    ({"rank_cores": ((0,),)}, "npuDeviceIds: has no effect"),
    ({"device_ids": (1,)}, "npuDeviceIds: has no effect"),
    ({"plugin_options": {"model": "x"}}, r"vllm\.model: is not to be given"),
    ({"plugin_options": {"tokenizer": "x"}}, r"vllm\.tokenizer: is not to be given"),
    ({"plugin_options": {"skip_tokenizer_init": True}}, r"vllm\.skip_tokenizer_init: is not to be given"),
    ({"plugin_options": {"served_model_name": "x"}}, r"vllm\.served_model_name: is not to be given"),
    ({"plugin_options": {"max_logprobs": 5}}, r"vllm\.max_logprobs: is not to be given"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED)
def test_a_setting_that_vllm_has_no_use_for_is_refused_by_name(folder, fields, words):
    with pytest.raises(BadRequest, match=words):
        open_engine(EngineConfig(model=str(folder), backend="vllm", **fields), lambda: model_tokenizer(str(folder)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"enforce_eagre": True}, r"vllm\.enforce_eagre: is no argument of vLLM 0\.32\.0; enforce_eager is one"),
        ({"max_num_seqs": "many"}, r"vllm: argument --max-num-seqs: invalid int value: 'many'"),
    ],
)
def test_vllms_own_arguments_are_checked_by_the_vllm_that_is_installed(folder, options, words):
    config = EngineConfig(model=str(folder), backend="vllm", plugin_options=options)
    for ask in (check, lambda config: open_engine(config, lambda: model_tokenizer(config.model))):
        with pytest.raises(ModelError, match=words):
            ask(config)
    check(replace(config, plugin_options={"enforce_eager": True, "max_num_seqs": 3}))


def test_a_model_that_is_no_folder_is_refused(tmp_path):
    (tmp_path / "m.gguf").touch()
    with pytest.raises(BadRequest, match="model: must be a folder"):
        check(EngineConfig(model=str(tmp_path / "m.gguf"), backend="vllm"))
