"""EngineThread over a real rank process: streams, cancels, and what happens when the process is killed."""

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import pytest

from kvloom.engine.config import EngineConfig
from kvloom.engine.errors import BadRequest, GenerationFailed, ModelError, Unavailable
from kvloom.engine.executor import RankExecutor, restart_with_backoff
from kvloom.engine.fake import ByteTokenizer, fake_answer
from kvloom.engine.request import Request, SamplingParams
from kvloom.engine.thread import EngineThread, open_engine

PROMPT = tuple(range(1, 40))


def with_engine(
    body: Callable[[EngineThread], Awaitable[None]],
    limit_s: float = 30.0,
    vocabulary: ByteTokenizer | None = None,
    **fields: object,
) -> None:
    """Run `body` against an engine with the fake model in a rank process."""

    async def main() -> None:
        config = EngineConfig(backend="fake", **{"num_blocks": 64, "fake_step_s": 0.002, **fields})  # type: ignore[arg-type]
        engine = open_engine(config, lambda: vocabulary or ByteTokenizer())
        engine.start(asyncio.get_running_loop())
        try:
            await asyncio.wait_for(body(engine), limit_s)
        finally:
            await asyncio.to_thread(engine.close)

    asyncio.run(main())


async def collect(engine: EngineThread, request: Request) -> list[int]:
    async with aclosing(engine.stream(request)) as deltas:
        return [token async for delta in deltas for token in delta.token_ids]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def endless(name: str, seed: int = 1) -> Request:
    return Request(name, PROMPT, SamplingParams(seed=seed, ignore_eos=True, max_tokens=900))


def rank_pid(engine: EngineThread) -> int:
    assert isinstance(engine._executor, RankExecutor)
    return engine._executor.pids[0]


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


@pytest.mark.parametrize("num_running", [0, 5])
def test_a_killed_rank_ends_its_requests_within_a_second_and_comes_back(num_running):
    async def body(engine: EngineThread) -> None:
        tasks = [asyncio.create_task(collect(engine, endless(f"r{i}", i))) for i in range(num_running)]
        await until(lambda: engine.stats().num_running == num_running)
        pid = rank_pid(engine)
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(1.0):
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(result) for result in results] == ["the model process was killed by signal 9"] * num_running
        assert all(isinstance(result, GenerationFailed) for result in results)
        await until(lambda: engine.is_ready and rank_pid(engine) != pid)
        assert await collect(engine, Request("again", PROMPT, SamplingParams(max_tokens=1)))
        assert engine.stats().total_restarts == 1

    with_engine(body)


def test_requests_made_while_the_rank_is_gone_are_refused_or_failed_but_answered():
    async def body(engine: EngineThread) -> None:
        task = asyncio.create_task(collect(engine, endless("a")))
        await until(lambda: engine.stats().num_running == 1)
        os.kill(rank_pid(engine), signal.SIGKILL)
        with pytest.raises(GenerationFailed):
            await task
        results = await asyncio.gather(*(collect(engine, endless(f"r{i}")) for i in range(3)), return_exceptions=True)
        assert all(isinstance(result, Unavailable | GenerationFailed) for result in results)

    with_engine(body)


def test_a_rank_that_does_not_answer_is_taken_for_dead():
    async def body(engine: EngineThread) -> None:
        task = asyncio.create_task(collect(engine, endless("a")))
        await until(lambda: engine.stats().num_running == 1)
        os.kill(rank_pid(engine), signal.SIGSTOP)
        with pytest.raises(GenerationFailed, match=r"did not answer within 0\.3 s"):
            await task
        await until(lambda: engine.is_ready)

    with_engine(body, step_timeout_s=0.3)


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
        with pytest.raises(GenerationFailed, match="the server is stopping"):
            await task
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        with pytest.raises(Unavailable):
            await collect(engine, endless("b"))
        engine.close()

    with_engine(body)


def test_a_model_that_cannot_be_loaded_is_a_model_error():
    with pytest.raises(ModelError, match="nowhere"):
        open_engine(EngineConfig(model="/nowhere/model.gguf", backend="reference"), ByteTokenizer)


def test_restarts_are_tried_again_with_growing_pauses_until_closing():
    class Broken:
        tries = 0

        def restart(self) -> None:
            self.tries += 1
            if self.tries < 9:
                raise ModelError("still broken")

    pauses: list[float] = []
    assert restart_with_backoff(Broken().restart, lambda: False, pauses.append)
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0]
    closing = threading.Event()
    assert not restart_with_backoff(Broken().restart, closing.is_set, lambda _: closing.set())
