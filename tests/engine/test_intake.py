"""Intake: a bounded amount of new requests is accepted between two steps, so that running streams continue."""

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import ServingError, Unavailable
from kvloom.contract.messages import Batch
from kvloom.contract.request import Delta, FinishReason, Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.engine import Engine
from kvloom.engine.inbox import MAX_REQUESTS, MAX_WEIGHT, Add, Drop, Intake, Unload, weight
from kvloom.engine.link.executor import InProcessExecutor
from kvloom.engine.thread import EngineThread
from kvloom.rank.fake import ByteTokenizer, FakeRunner


def request(name: str, num_tokens: int = 1, **params: object) -> Request:
    return Request(name, tuple(range(1, 200)) * (num_tokens // 199) + (7,) * (num_tokens % 199), _params(**params))


def _params(**fields: object) -> SamplingParams:
    return SamplingParams(**{"seed": 1, "max_tokens": 2, "ignore_eos": True, **fields})


def names(intake: Intake) -> list[str]:
    return [message.request.id for message in intake.take() if isinstance(message, Add)]


@pytest.mark.parametrize(
    ("num_tokens", "num_taken"), [(1, MAX_REQUESTS), (MAX_WEIGHT // 4, 4), (MAX_WEIGHT, 1), (3 * MAX_WEIGHT, 1)]
)
def test_a_round_takes_so_many_requests_and_so_many_tokens_but_always_one(num_tokens, num_taken):
    intake = Intake()
    given = [f"r{i}" for i in range(2 * num_taken + 1)]
    for name in given:
        intake.put(Add(request(name, num_tokens)))
    assert [names(intake), names(intake), names(intake), names(intake)] == [
        given[:num_taken],
        given[num_taken : 2 * num_taken],
        given[2 * num_taken :],
        [],
    ]


def test_a_bias_counts_as_tokens():
    assert weight(request("a", 3, logit_bias={1: 1.0, 2: 1.0})) == 5


def test_other_messages_keep_their_order_among_requests():
    intake = Intake()
    messages = [Add(request("a")), Unload(1), *(Add(request(f"r{i}")) for i in range(MAX_REQUESTS)), Unload(2)]
    for message in messages:
        assert not intake.put(message)
    assert [*intake.take(), *intake.take()] == messages


def test_what_is_dropped_before_its_turn_is_never_taken_up():
    intake = Intake()
    for name in ("a", "b", "c"):
        intake.put(Add(request(name)))
    assert intake.put(Drop("b"))
    assert not intake.put(Drop("gone before"))
    assert names(intake) == ["a", "c"]


class Recorder(InProcessExecutor):
    """An executor that records every batch, and computes only while `gate` is open."""

    def __init__(self) -> None:
        super().__init__(FakeRunner(EngineConfig(backend="fake", max_seq_len=4096)))
        self.batches: list[Batch] = []
        self.gate = threading.Event()
        self.gate.set()
        self.is_waiting = threading.Event()

    def submit(self, batch: Batch) -> None:
        self.batches.append(batch)
        self.is_waiting.set()
        self.gate.wait()
        self.is_waiting.clear()
        super().submit(batch)


def with_engine(body: Callable[[EngineThread, Recorder], Awaitable[None]], **fields: object) -> None:
    async def main() -> None:
        executor = Recorder()
        config = EngineConfig(
            backend="fake", **{"max_batch": 512, "max_tokens_per_step": 8192, "max_gap_s": 0.0, **fields}
        )
        engine = EngineThread(Engine(config, executor, ByteTokenizer()), executor)
        engine.start(asyncio.get_running_loop())
        try:
            await asyncio.wait_for(body(engine, executor), 120)
        finally:
            executor.gate.set()
            await asyncio.to_thread(engine.close)

    asyncio.run(main())


async def begin_to_stream(engine: EngineThread, executor: Recorder, num_tokens: int) -> None:
    """Starts a neighbour's request, whose first step does not end before the gate is opened."""
    executor.gate.clear()
    engine.open([request("neighbour", max_tokens=num_tokens)])
    assert await asyncio.to_thread(executor.is_waiting.wait, 20)


async def read(engine: EngineThread, requests: list[Request]) -> list[tuple[int, Delta]]:
    with engine.open(requests) as feed:
        found: list[tuple[int, Delta]] = []
        while step := await feed.get():
            found += step
        return found


def test_a_stream_gets_a_token_between_any_two_parts_of_a_large_request():
    async def body(engine: EngineThread, executor: Recorder) -> None:
        await begin_to_stream(engine, executor, 200)
        prompts = [(1 + i // 100, 1 + i % 100, *[7] * 98) for i in range(300)]  # which share no block
        reading = asyncio.create_task(read(engine, [Request(f"r{i}", ids, _params()) for i, ids in enumerate(prompts)]))
        await asyncio.sleep(0)
        executor.gate.set()
        deltas = await reading
        steps = [batch for batch in executor.batches[1:] if batch.new]
        assert sum(len(batch.new) for batch in steps) == 300
        for batch in steps:
            assert len(batch.new) <= MAX_REQUESTS
            assert sum(len(new.token_ids) for new in batch.new) <= MAX_WEIGHT
            assert 0 in [work.id for work in batch.work], "the neighbour, who was first, is left out"
        ends = [index for index, delta in deltas if delta.finish_reason]
        assert sorted(ends) == list(range(300)), "each is answered exactly once"

    with_engine(body)


def test_requests_given_up_before_their_turn_cost_the_model_nothing():
    async def body(engine: EngineThread, executor: Recorder) -> None:
        await begin_to_stream(engine, executor, 50)
        with engine.open([request(f"gone{i}") for i in range(300)]):
            pass
        left = asyncio.create_task(read(engine, [request("stays")]))
        await asyncio.sleep(0)
        executor.gate.set()
        assert [delta.finish_reason for _, delta in await left][-1] is FinishReason.LENGTH
        assert sum(len(batch.new) for batch in executor.batches) == 2

    with_engine(body)


def test_an_abort_before_its_turn_is_answered_once():
    async def body(engine: EngineThread, executor: Recorder) -> None:
        await begin_to_stream(engine, executor, 50)
        reading = asyncio.create_task(read(engine, [request(f"r{i}") for i in range(3)]))
        await asyncio.sleep(0)
        engine.abort("r1")
        executor.gate.set()
        ends = [(index, delta.finish_reason) for index, delta in await reading if delta.finish_reason]
        assert sorted(ends) == [(0, FinishReason.LENGTH), (1, FinishReason.ABORT), (2, FinishReason.LENGTH)]

    with_engine(body)


def test_closing_answers_requests_that_nobody_has_taken_up():
    async def body(engine: EngineThread, executor: Recorder) -> None:
        await begin_to_stream(engine, executor, 500)
        reading = [asyncio.create_task(read(engine, [request(f"r{i}")])) for i in range(3 * MAX_REQUESTS)]
        await asyncio.sleep(0)
        closing = asyncio.create_task(asyncio.to_thread(engine.close))
        while engine.is_ready:
            await asyncio.sleep(0)
        executor.gate.set()
        await closing
        errors = await asyncio.gather(*reading, return_exceptions=True)
        assert {type(error) for error in errors} <= {Unavailable, ServingError}, errors
        assert {str(error) for error in errors} == {"the server is stopping"}

    with_engine(body)
