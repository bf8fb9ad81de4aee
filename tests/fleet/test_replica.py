"""A replica's engine: what it streams, what it reports, which errors keep it from starting. Without Ray."""

import asyncio
import itertools
from contextlib import aclosing

import msgspec
import pytest

from kvloom.contract.errors import BadRequest
from kvloom.contract.request import FinishReason, Request
from kvloom.contract.sampling import SamplingParams
from kvloom.fleet.args import FleetArgs, Mock
from kvloom.fleet.figures import sum_of
from kvloom.fleet.plan import make_plan
from kvloom.fleet.replica import EngineReplica
from kvloom.fleet.wire import Asked, Brought, Ended, Fault, Hello, decode_about, decode_item, encode
from kvloom.rank.fake import fake_answer
from tests.fleet.fleets import with_missing_adapter

PROMPT = tuple(b"a prompt of some blocks, which is to be cached")


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def replica(loop):
    made = EngineReplica(make_plan(FleetArgs(backend="fake", mock=Mock(step_ms=1))), "r1", "n1")
    loop.run(made.start())
    yield made
    made.close()


numbers = itertools.count()


def ask(**more):
    params = SamplingParams(max_tokens=30, seed=5, ignore_eos=True)
    return Request(**{"id": f"q{next(numbers)}", "prompt_ids": PROMPT, "params": params} | more)


async def items(stream):
    return [decode_item(data) async for data in stream]


def deltas(found):
    return [delta for item in found if isinstance(item, Brought) for delta in item.deltas]


def test_a_stream_greets_then_brings_the_answer(loop, replica):
    first, *rest = loop.run(items(replica.stream(encode(Asked(ask())))))
    assert first == Hello("r1", replica.about().layout, replica.about().serves)
    found = deltas(rest)
    assert rest[-1] == Ended(len(found))
    assert [token for delta in found for token in delta.token_ids] == fake_answer(PROMPT, ask().params, 5, 30)
    assert [delta.finish_reason for delta in found if delta.finish_reason] == [FinishReason.LENGTH]


def test_what_is_fast_goes_together(loop, replica):
    found = loop.run(items(replica.stream(encode(Asked(ask())))))
    assert 2 < len(found) < 30


def test_it_goes_on_with_another_ones_answer(loop, replica):
    whole = fake_answer(PROMPT, ask().params, 5, 30)
    found = deltas(loop.run(items(replica.stream(encode(Asked(ask(answer=tuple(whole[:7]))))))))
    assert [token for delta in found for token in delta.token_ids] == whole[7:]


def test_a_prefill_ends_with_the_first_token_and_says_no_end(loop, replica):
    found = deltas(loop.run(items(replica.prefill(encode(Asked(ask()))))))
    whole = fake_answer(PROMPT, ask().params, 5, 30)
    tokens = [token for delta in found for token in delta.token_ids]
    assert tokens == whole[: len(tokens)]
    assert 1 <= len(tokens) < 30
    assert not any(delta.finish_reason for delta in found)
    assert replica.queued_tokens == 0


def test_a_request_that_can_never_run_is_told_as_it_would_be_by_one_server(loop, replica):
    found = loop.run(items(replica.stream(encode(Asked(ask(prompt_ids=()))))))
    assert found[1:] == [Fault("BadRequest", "is empty: give at least one token", "prompt")]


def test_who_goes_away_leaves_nothing(loop, replica):
    async def leave():
        async with aclosing(replica.stream(encode(Asked(ask())))) as stream:
            await anext(stream)
            assert replica.queued_tokens == len(PROMPT)

    loop.run(leave())
    assert replica.queued_tokens == 0


def test_a_report_is_plain_and_adds_up(loop, replica):
    loop.run(items(replica.stream(encode(Asked(ask())))))
    report = replica.report()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(report)) == report
    both = sum_of([report["figures"], report["figures"]])
    assert both.total_output_tokens == 2 * report["figures"]["total_output_tokens"] > 0
    assert both.step_tokens.count == 2 * sum(report["figures"]["step_tokens"][0])
    assert both.decode_step_s == report["figures"]["decode_step_s"]


def test_about_crosses_the_wire(replica):
    assert decode_about(encode(replica.about())) == replica.about()


def test_an_adapter_that_is_not_there_keeps_it_from_starting(loop, tmp_path):
    made = EngineReplica(make_plan(FleetArgs(config=str(with_missing_adapter(tmp_path)))), "r", "n")
    with pytest.raises(BadRequest, match="loraModules: a=/nowhere: "):
        loop.run(made.start())
