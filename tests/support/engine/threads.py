"""EngineThreads over the fake model in a rank process, and their readers."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing

from kvloom.contract.config import EngineConfig
from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.engine import Engine
from kvloom.engine.link.executor import Executor
from kvloom.engine.link.ranks import RankExecutor
from kvloom.engine.thread import EngineThread
from kvloom.rank.fake import ByteTokenizer
from kvloom.rank.opening import open_engine
from tests.support.waiting import WAIT_S

PROMPT = tuple(range(1, 40))
GREEDY = SamplingParams(temperature=0, ignore_eos=True, max_tokens=60)


def with_engine(
    body: Callable[[EngineThread], Awaitable[None]],
    limit_s: float = WAIT_S,
    vocabulary: ByteTokenizer | None = None,
    executor: Executor | None = None,
    **fields: object,
) -> None:
    """Runs `body` against an engine with the fake model in a rank process, or with `executor`."""

    async def main() -> None:
        config = EngineConfig(backend="fake", **{"num_blocks": 64, "fake_step_s": 0.002, **fields})
        tokenizer = vocabulary or ByteTokenizer()
        if executor is None:
            engine = open_engine(config, lambda: tokenizer)
        else:
            engine = EngineThread(Engine(config, executor, tokenizer), executor)
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


def rank_pids(engine: EngineThread) -> list[int]:
    assert isinstance(engine._executor, RankExecutor)
    return engine._executor.pids


def rank_pid(engine: EngineThread) -> int:
    return rank_pids(engine)[0]
