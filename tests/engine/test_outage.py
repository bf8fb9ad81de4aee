"""EngineThread while its rank is down: streams resume with the same tokens, new requests wait, up to a time limit."""

import asyncio
import logging
import os
import signal
import sys
import threading
from dataclasses import replace

import pytest

from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import GenerationFailed, ModelError, ServingError, Unavailable
from kvloom.contract.messages import AdapterInfo
from kvloom.contract.request import FinishReason, Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.driver import OTHER_WEIGHTS
from kvloom.engine.engine import GUILTY
from kvloom.engine.link.ranks import RankExecutor
from kvloom.engine.outage import restart_with_backoff
from kvloom.engine.thread import EngineThread
from kvloom.processes import kinds
from kvloom.rank.fake import FakeRunner, fake_answer
from tests.support.engine.crashes import ShyExecutor
from tests.support.engine.threads import PROMPT, collect, endless, rank_pid, rank_pids, until, with_engine
from tests.support.models.adapters import TINY_SHAPES, make_adapter

CONFIG = EngineConfig(backend="fake", num_blocks=256, fake_step_s=0.001)


def shy() -> ShyExecutor:
    return ShyExecutor(lambda: FakeRunner(CONFIG))


def asked(name: str, num_tokens: int = 60, seed: int = 1) -> Request:
    """Requests of different names share no block."""
    return Request(name, (ord(name[0]), *PROMPT), SamplingParams(seed=seed, ignore_eos=True, max_tokens=num_tokens))


def truth(request: Request) -> list[int]:
    params = request.params
    return fake_answer(request.prompt_ids, params, params.seed or 0, params.max_tokens or 0)


async def running(engine: EngineThread, *requests: Request) -> list[asyncio.Task[list[int]]]:
    tasks = [asyncio.create_task(collect(engine, request)) for request in requests]
    await until(lambda: engine.stats().num_running == len(requests))
    return tasks


async def away(engine: EngineThread, executor: ShyExecutor) -> None:
    executor.die()
    await until(lambda: executor.num_tries > 0)


# -- the pause


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("num_running", [0, 1, 5])
def test_a_killed_rank_is_a_pause(num_running: int, world_size: int):
    async def body(engine: EngineThread) -> None:
        requests = [asked(f"r{i}", seed=i) for i in range(num_running)]
        tasks = await running(engine, *requests)
        pids = rank_pids(engine)
        os.kill(pids[-1], signal.SIGKILL)
        assert await asyncio.gather(*tasks) == [truth(request) for request in requests]
        await until(lambda: engine.is_ready and not set(pids) & set(rank_pids(engine)))
        assert await collect(engine, asked("again", 1))
        stats = engine.stats()
        assert (stats.total_restarts, stats.total_crashes, stats.total_guilty) == (1, 1, 0)
        assert stats.total_resumed == num_running

    with_engine(body, world_size=world_size)


def test_a_rank_that_does_not_answer_is_taken_for_dead():
    async def body(engine: EngineThread) -> None:
        (task,) = await running(engine, asked("a"))
        os.kill(rank_pid(engine), signal.SIGSTOP)
        assert await task == truth(asked("a"))
        assert engine.stats().total_crashes == 1

    with_engine(body, step_timeout_s=3.0)  # far more than a step of a running rank takes


def test_a_rank_that_says_nothing_while_it_is_loaded_again_is_loaded_once_more(caplog):
    async def body(engine: EngineThread) -> None:
        (task,) = await running(engine, asked("a"))
        executor = engine._executor
        assert isinstance(executor, RankExecutor)
        hangs = (sys.executable, "-c", "import time; time.sleep(1e6)")
        kind, executor._kind = executor._kind, replace(kinds.RANK, command=hangs, silence_s=0.5)
        os.kill(rank_pid(engine), signal.SIGKILL)
        await until(lambda: "the model process gave no sign of life for 0.5 s" in caplog.text)
        executor._kind = kind
        assert await task == truth(asked("a"))

    with_engine(body)


def test_the_log_says_what_happened_in_one_line(caplog):
    async def body(engine: EngineThread) -> None:
        tasks = await running(engine, asked("a"), asked("b"))
        os.kill(rank_pid(engine), signal.SIGKILL)
        await asyncio.gather(*tasks)

    with caplog.at_level(logging.WARNING):
        with_engine(body)
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("kvloom.engine")]
    first, last = lines
    assert first == "the model process was killed by signal 9; 2 requests wait until it is back"
    assert last.startswith("the model is ready again after ")
    assert last.endswith(" s (the model process was killed by signal 9): 2 requests go on")


def test_requests_that_come_while_the_rank_is_away_wait_and_it_is_not_ready():
    executor = shy()

    async def body(engine: EngineThread) -> None:
        (before,) = await running(engine, asked("before"))
        await away(engine, executor)
        during = asyncio.create_task(collect(engine, asked("during", 5)))
        refused = asyncio.create_task(collect(engine, Request("empty", ())))
        with pytest.raises(ServingError, match="prompt: is empty"):
            await refused
        assert not engine.is_ready
        with pytest.raises(Unavailable):
            engine.check_ready()
        with pytest.raises(Unavailable):
            await engine.load_adapter("/nowhere")
        executor.may_return.set()
        assert [await before, await during] == [truth(asked("before")), truth(asked("during", 5))]
        assert engine.is_ready

    with_engine(body, executor=executor)


def test_whoever_leaves_while_the_rank_is_away_is_told_and_not_computed_again():
    executor = shy()

    async def body(engine: EngineThread) -> None:
        with engine.open([asked("a"), asked("b", 900)]) as feed:
            await until(lambda: engine.stats().num_running == 2)
            await away(engine, executor)
            engine.abort("b")
            ends = []
            while not ends:
                ends = [
                    delta.finish_reason for index, delta in await feed.get() or () if index == 1 and delta.finish_reason
                ]
            assert ends == [FinishReason.ABORT]
            late = asyncio.create_task(collect(engine, asked("late")))
            await until(lambda: engine.stats().num_waiting == 2)
            late.cancel()
            await until(lambda: engine.stats().num_waiting == 1)
            assert executor.is_dead
            executor.may_return.set()
            tokens = []
            while step := await feed.get():
                tokens += [token for _, delta in step for token in delta.token_ids]
            assert tokens == truth(asked("a"))[-len(tokens) :]

    with_engine(body, executor=executor)


# -- a rank that does not come back


def test_a_model_that_does_not_come_back_in_time_ends_its_requests_and_refuses_others_until_it_does():
    executor = shy()
    executor.refusals = [ModelError("no room")]

    async def body(engine: EngineThread) -> None:
        tasks = await running(engine, asked("a"), asked("b"))
        await away(engine, executor)
        for task in tasks:
            with pytest.raises(Unavailable, match="the model died and has not come back within 0 s; try again later"):
                await task
        with pytest.raises(Unavailable, match="not ready"):
            await collect(engine, asked("c"))
        executor.may_return.set()
        await until(lambda: engine.is_ready)
        assert await collect(engine, asked("d")) == truth(asked("d"))
        assert executor.num_tries == 2

    with_engine(body, executor=executor, crash_patience_s=0.3)


def test_without_patience_requests_end_at_once():
    async def body(engine: EngineThread) -> None:
        (task,) = await running(engine, endless("a"))
        os.kill(rank_pid(engine), signal.SIGKILL)
        with pytest.raises(Unavailable):
            await task
        await until(lambda: engine.is_ready)
        assert await collect(engine, asked("b")) == truth(asked("b"))

    with_engine(body, crash_patience_s=0.0)


def test_a_rank_that_dies_while_it_opens_is_opened_again():
    async def body(engine: EngineThread) -> None:
        (task,) = await running(engine, asked("a"))
        seen = {rank_pid(engine)}
        os.kill(rank_pid(engine), signal.SIGKILL)
        for _ in range(2):
            await until(lambda: not set(rank_pids(engine)) <= seen)
            seen.update(rank_pids(engine))
            assert not engine.is_ready
            os.kill(rank_pid(engine), signal.SIGKILL)
        assert await task == truth(asked("a"))
        assert (engine.stats().total_crashes, engine.stats().total_guilty) == (1, 0)

    with_engine(body)


def test_weights_that_have_changed_meanwhile_do_not_continue_the_answers_of_others(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"weights")
    executor = shy()

    async def body(engine: EngineThread) -> None:
        for text in (b"other weights", b"and others"):
            tasks = await running(engine, asked("a"), asked("b"))
            await away(engine, executor)
            file.write_bytes(text)
            executor.may_return.set()
            for task in tasks:
                with pytest.raises(GenerationFailed, match=OTHER_WEIGHTS):
                    await task
            await until(lambda: engine.is_ready)
            executor.may_return.clear()
            executor.num_tries = 0
        (task,) = await running(engine, asked("c"))
        executor.may_return.set()
        executor.die()
        assert await task == truth(asked("c"))

    with_engine(body, executor=executor, model=str(tmp_path))


def test_answers_of_other_weights_end_though_the_rank_dies_again_while_adapters_are_read(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"weights")
    folder = str(make_adapter(tmp_path / "adapter", TINY_SHAPES))
    executor = shy()
    load = executor.load_adapter

    def die_once(id: int, path: str) -> AdapterInfo:
        executor.load_adapter = load  # type: ignore[method-assign]
        executor.die()
        return load(id, path)

    async def body(engine: EngineThread) -> None:
        await engine.load_adapter(folder)
        (task,) = await running(engine, asked("a"))
        executor.load_adapter = die_once  # type: ignore[method-assign]
        await away(engine, executor)
        file.write_bytes(b"other weights")
        executor.may_return.set()
        with pytest.raises(GenerationFailed, match=OTHER_WEIGHTS):
            await task
        await until(lambda: engine.is_ready)
        assert executor.num_tries > 1
        assert await collect(engine, asked("b")) == truth(asked("b"))

    with_engine(body, executor=executor, model=str(tmp_path))


def test_a_request_that_kills_its_rank_is_ended_and_the_next_are_served():
    """Requests enter as they do from HTTP. The error is the request's own, and the other request is answered."""
    executor = shy()
    executor.may_return.set()
    poisoned: set[int] = set()

    def kills(batch: object) -> bool:
        poisoned.update(new.id for new in batch.new if new.token_ids[0] == 99)
        return any(work.id in poisoned for work in batch.work)

    executor.kills = kills

    async def body(engine: EngineThread) -> None:
        tasks = await running(engine, asked("a", 300))
        poison = replace(asked("poison"), prompt_ids=(99, 1, 2))
        with pytest.raises(GenerationFailed) as caught:
            await collect(engine, poison)
        assert str(caught.value) == GUILTY
        assert await tasks[0] == truth(asked("a", 300))
        assert (executor.num_tries, engine.stats().total_guilty) == (2, 1)

    with_engine(body, executor=executor)


# -- closing


def test_closing_while_the_rank_is_away_ends_all_at_once():
    executor = shy()

    async def body(engine: EngineThread) -> None:
        tasks = await running(engine, asked("a"))
        await away(engine, executor)
        tasks.append(asyncio.create_task(collect(engine, asked("b"))))
        await until(lambda: engine.stats().num_waiting == 2)
        await asyncio.to_thread(engine.close)
        for task in tasks:
            with pytest.raises(Unavailable, match="the server is stopping"):
                await task
        assert executor.num_kills > 0
        assert not any(thread.name == "restart" for thread in threading.enumerate())
        with pytest.raises(Unavailable):
            await collect(engine, asked("c"))

    with_engine(body, executor=executor)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_model_that_is_to_sleep_comes_back_only_for_those_who_wait(leaves: bool):
    executor = shy()

    async def body(engine: EngineThread) -> None:
        (task,) = await running(engine, asked("a"))
        asleep = asyncio.create_task(engine.sleep())
        await until(lambda: not engine.is_ready)
        await away(engine, executor)
        with pytest.raises(Unavailable):
            await collect(engine, asked("late"))
        if leaves:
            task.cancel()
        else:
            executor.may_return.set()
            assert await task == truth(asked("a"))
        await asleep
        executor.num_kills = 0
        executor.may_return.set()
        await engine.wake(wants_same_weights=True)
        assert await collect(engine, asked("b")) == truth(asked("b"))

    with_engine(body, executor=executor)


def test_whoever_wakes_a_model_that_was_to_sleep_while_its_rank_is_away_opens_its_door_again():
    executor = shy()

    async def body(engine: EngineThread) -> None:
        (task,) = await running(engine, asked("a"))
        asleep = asyncio.create_task(engine.sleep())
        await until(lambda: not engine.is_ready)
        await away(engine, executor)
        await engine.wake(wants_same_weights=True)
        with pytest.raises(Unavailable, match="woken before it slept"):
            await asleep
        late = asyncio.create_task(collect(engine, asked("late")))
        await engine.reset_prefix_cache(preempts=True) if engine.is_ready else None
        executor.may_return.set()
        assert [await task, await late] == [truth(asked("a")), truth(asked("late"))]

    with_engine(body, executor=executor)


def test_restarts_are_tried_again_with_growing_pauses_until_closing(caplog):
    class Broken:
        tries = 0

        def restart(self) -> None:
            self.tries += 1
            if self.tries < 9:
                raise ModelError("still broken")

    pauses: list[float] = []
    assert restart_with_backoff(Broken().restart, lambda: False, pauses.append)
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0]
    assert caplog.messages == ["loading the model again failed: still broken"] * 8
    closing = threading.Event()
    assert not restart_with_backoff(Broken().restart, closing.is_set, lambda _: closing.set())
