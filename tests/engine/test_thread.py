"""EngineThread over a real rank process: streams, cancels, and what happens when the process is killed."""

import asyncio
import logging
import os
import signal
from contextlib import aclosing

import pytest

from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import BadRequest, GenerationFailed, ModelError, Unavailable
from kvloom.contract.messages import Batch, StepOutput
from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.engine import Engine
from kvloom.engine.link.ranks import RankExecutor
from kvloom.engine.thread import EngineThread
from kvloom.rank.fake import ByteTokenizer, FakeRunner, fake_answer
from kvloom.rank.opening import open_engine
from tests.support.engine.threads import GREEDY, PROMPT, collect, endless, rank_pid, until, with_engine
from tests.support.servers import FakeExecutor


def test_concurrent_streams_each_get_their_own_answer():
    async def body(engine: EngineThread) -> None:
        requests = [Request(f"r{i}", PROMPT[: i + 1], SamplingParams(seed=i, max_tokens=20)) for i in range(20)]
        answers = await asyncio.gather(*(collect(engine, request) for request in requests))
        for request, answer in zip(requests, answers, strict=True):
            assert answer == fake_answer(request.prompt_ids, request.params, request.params.seed or 0, len(answer))

    with_engine(body)


def test_closing_a_stream_frees_its_blocks():
    async def body(engine: EngineThread) -> None:
        async with aclosing(engine.stream(endless("a"))) as deltas:
            async for _ in deltas:
                break
        await until(lambda: engine.stats().num_running == 0 and engine.stats().num_free_blocks == 64)
        assert await collect(engine, Request("a", PROMPT, SamplingParams(max_tokens=1)))

    with_engine(body)


def test_an_id_that_is_used_again_at_once_gets_nothing_of_the_request_before():
    """The reader leaves while tokens and the end of its request are still on their way from the engine's thread."""

    async def body(engine: EngineThread) -> None:
        for seed in range(20):
            async with aclosing(engine.stream(endless("a"))) as deltas:
                async for _ in deltas:
                    break
            again = Request("a", PROMPT[:9], SamplingParams(seed=seed, ignore_eos=True, max_tokens=12))
            assert await collect(engine, again) == fake_answer(again.prompt_ids, again.params, seed, 12)
        await until(lambda: engine.stats().num_running == 0 and engine.stats().num_free_blocks == 64)

    with_engine(body)


def test_an_id_that_is_used_again_at_once_for_what_can_never_run_is_refused():
    """Deltas of the earlier request, which are still on their way, do not hide the refusal."""

    async def body(engine: EngineThread) -> None:
        for _ in range(20):
            async with aclosing(engine.stream(endless("a"))) as deltas:
                async for _ in deltas:
                    break
            with pytest.raises(BadRequest, match="prompt: is empty"):
                await collect(engine, Request("a", ()))

    with_engine(body)


def test_who_leaves_ends_nobody_else_s_request_of_a_name_that_had_been_his():
    async def body(engine: EngineThread) -> None:
        short = Request("a", PROMPT, SamplingParams(max_tokens=1))
        with engine.open([short, endless("b")]) as feed:
            while not any(delta.finish_reason for index, delta in await feed.get() if index == 0):
                pass
            other = asyncio.create_task(collect(engine, Request("a", PROMPT, GREEDY)))
            await until(lambda: engine.stats().num_running == 2)
        assert await other == fake_answer(PROMPT, GREEDY, 0, 60)

    with_engine(body)


def test_an_id_that_is_read_cannot_be_used_again():
    async def body(engine: EngineThread) -> None:
        with engine.open([endless("a")]):
            with pytest.raises(BadRequest, match="'a' is in use by a running request"):
                engine.open([endless("b"), endless("a")])
            with engine.open([endless("b")]) as feed:
                assert await feed.get()

    with_engine(body)


def test_a_cancelled_reader_cancels_its_request():
    async def body(engine: EngineThread) -> None:
        task = asyncio.create_task(collect(engine, endless("a")))
        await until(lambda: engine.stats().num_running == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: engine.stats().num_running == 0)

    with_engine(body)


def test_a_request_that_can_never_run_raises_in_its_own_stream():
    async def body(engine: EngineThread) -> None:
        with pytest.raises(BadRequest, match="prompt: is empty"):
            await collect(engine, Request("a", ()))
        assert await collect(engine, Request("a", PROMPT, SamplingParams(max_tokens=1)))

    with_engine(body)


def test_a_bug_in_a_step_fails_its_requests_and_the_engine_goes_on(caplog):
    class Breakable(ByteTokenizer):
        is_broken = True

        def token_bytes(self, token_id: int) -> bytes:
            if self.is_broken:
                raise ZeroDivisionError("planted")
            return super().token_bytes(token_id)

    vocabulary = Breakable()

    async def body(engine: EngineThread) -> None:
        with pytest.raises(GenerationFailed, match="the engine failed on a step"):
            await collect(engine, endless("a"))
        vocabulary.is_broken = False
        await until(lambda: engine.is_ready)
        assert await collect(engine, Request("b", PROMPT, SamplingParams(max_tokens=1)))

    with_engine(body, vocabulary=vocabulary)
    assert "ZeroDivisionError: planted" in caplog.text


def test_closing_the_engine_ends_running_requests_and_the_process():
    async def body(engine: EngineThread) -> None:
        task = asyncio.create_task(collect(engine, endless("a")))
        await until(lambda: engine.stats().num_running == 1)
        pid = rank_pid(engine)
        await asyncio.to_thread(engine.close)
        with pytest.raises(Unavailable, match="the server is stopping"):
            await task
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        with pytest.raises(Unavailable):
            await collect(engine, endless("b"))
        engine.close()

    with_engine(body)


@pytest.mark.parametrize("patience_s", [0.0, 0.2])
def test_closing_over_a_rank_that_hangs_is_no_crash_of_it(caplog, patience_s):
    caplog.set_level(logging.WARNING)

    async def body(engine: EngineThread) -> None:
        task = asyncio.create_task(collect(engine, endless("a")))
        await until(lambda: engine.stats().num_running == 1)
        os.kill(rank_pid(engine), signal.SIGSTOP)
        await asyncio.to_thread(engine.close, patience_s)
        with pytest.raises(Unavailable, match="the server is stopping"):
            await task

    with_engine(body)
    assert caplog.text == ""


def test_a_model_that_cannot_be_loaded_is_a_model_error():
    with pytest.raises(ModelError, match="nowhere"):
        open_engine(EngineConfig(model="/nowhere/model.gguf", backend="reference"), ByteTokenizer)


# -- sleep


@pytest.mark.parametrize("world_size", [1, 2])
def test_sleep_waits_for_what_runs_though_a_rank_dies_meanwhile(world_size: int):
    async def body(engine: EngineThread) -> None:
        for kills in (False, True):
            request = Request("r", PROMPT, SamplingParams(seed=1, ignore_eos=True, max_tokens=60))
            running = asyncio.create_task(collect(engine, request))
            await until(lambda: engine.stats().num_running == 1)
            assert isinstance(engine._executor, RankExecutor)
            pids = engine._executor.pids
            assert len(pids) == world_size
            asleep = asyncio.create_task(engine.sleep())
            await until(lambda: not engine.is_ready)
            if kills:
                os.kill(pids[-1], signal.SIGKILL)
            assert await running == fake_answer(PROMPT, request.params, 1, 60)
            await asleep
            assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
            with pytest.raises(Unavailable, match="asleep"):
                await collect(engine, endless("late"))
            assert engine.stats().num_running == engine.stats().num_cached_blocks == 0
            await engine.wake(wants_same_weights=True)
            assert len(await collect(engine, request)) == 60

    with_engine(body, world_size=world_size)


def test_a_model_that_is_woken_before_it_slept_stays_awake():
    async def body(engine: EngineThread) -> None:
        running = asyncio.create_task(collect(engine, endless("r")))
        await until(lambda: engine.stats().num_running == 1)
        pid = rank_pid(engine)
        asleep = asyncio.create_task(engine.sleep())
        await until(lambda: not engine.is_ready)
        await engine.wake(wants_same_weights=True)
        with pytest.raises(Unavailable, match="woken before it slept"):
            await asleep
        assert rank_pid(engine) == pid
        assert len(await running) == 900

    with_engine(body)


def test_weights_that_have_changed_are_loaded_only_when_others_are_wanted(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")

    async def body(engine: EngineThread) -> None:
        for _ in range(2):
            await engine.sleep()
            (tmp_path / "model.safetensors").write_bytes(b"other weights")
            with pytest.raises(ModelError, match="it sleeps on: its files have changed"):
                await engine.wake(wants_same_weights=True)
            assert not engine.is_ready
            await engine.wake(wants_same_weights=False)
            await engine.sleep()
            await engine.wake(wants_same_weights=True)  # the weights that were loaded last
            assert len(await collect(engine, Request("r", PROMPT, SamplingParams(max_tokens=1)))) == 1
            (tmp_path / "model.safetensors").unlink()

    async def main() -> None:
        executor = FakeExecutor(lambda: FakeRunner(EngineConfig(backend="fake", num_blocks=256)))
        config = EngineConfig(backend="fake", model=str(tmp_path))
        engine = EngineThread(Engine(config, executor, ByteTokenizer()), executor)
        engine.start(asyncio.get_running_loop())
        await body(engine)
        await asyncio.to_thread(engine.close)

    asyncio.run(main())


def test_closing_answers_whoever_waits_for_sleep():
    async def body(engine: EngineThread) -> None:
        asyncio.create_task(collect(engine, endless("r"))).add_done_callback(lambda task: task.exception())
        await until(lambda: engine.stats().num_running == 1)
        asleep = asyncio.create_task(engine.sleep())
        await until(lambda: not engine.is_ready)
        await asyncio.to_thread(engine.close)
        with pytest.raises(Unavailable, match="stopping"):
            await asleep
        with pytest.raises(Unavailable, match="stopping"):
            await engine.wake(wants_same_weights=True)

    with_engine(body)


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_idle_engine_gives_the_memory_of_its_blocks_back_and_goes_on(world_size: int):
    async def body(engine: EngineThread) -> None:
        for _ in range(2):
            assert await collect(engine, Request("a", PROMPT, GREEDY)) == fake_answer(PROMPT, GREEDY, 0, 60)
            await until(lambda: engine.stats().num_cached_blocks == 0)
            assert engine.stats().num_free_blocks == 64

    with_engine(body, idle_release_s=0.05, world_size=world_size)


def test_what_a_rank_takes_before_anybody_asks_is_given_back_too():
    released: list[int] = []

    class Runner(FakeRunner):
        def run(self, batch: Batch) -> StepOutput:
            released.extend(batch.release)
            return super().run(batch)

    async def body(engine: EngineThread) -> None:
        await until(lambda: sorted(released) == list(range(64)))
        released.clear()
        await engine.sleep()
        await engine.wake(wants_same_weights=False)
        await until(lambda: sorted(released) == list(range(64)))

    executor = FakeExecutor(lambda: Runner(EngineConfig(backend="fake", num_blocks=64)))
    with_engine(body, executor=executor, idle_release_s=0.05)


def test_without_a_time_nothing_is_given_back():
    async def body(engine: EngineThread) -> None:
        await collect(engine, Request("a", PROMPT, GREEDY))
        engine._driver._rest(1e9)
        assert engine.stats().num_cached_blocks > 0

    with_engine(body, idle_release_s=0)
