"""The fleet as the server sees it: one engine, whose requests survive the loss of their replicas."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.contract.errors import BadRequest, GenerationFailed, Overloaded, Unavailable
from kvloom.contract.images import Image, Sight
from kvloom.contract.request import FinishReason, Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.schedule.blocks import adapter_salt, extend_chain
from kvloom.fleet.engine import FleetEngine, Way, Ways
from kvloom.fleet.routing.board import Board
from kvloom.fleet.routing.knowledge import keys_of, packed
from kvloom.fleet.wire import About
from kvloom.rank.fake import fake_answer
from tests.fleet.fleets import INFO, Replicas, fleet_of
from tests.support.waiting import WAIT_S

PROMPT = tuple(range(65, 65 + 40))


def request(max_tokens=20, **params):
    return Request("r", PROMPT, SamplingParams(max_tokens=max_tokens, **{"seed": 5} | params))


async def answer(engine, asked):
    return [delta async for delta in engine.stream(asked)]


def tokens(deltas):
    return [token for delta in deltas for token in delta.token_ids]


@given(st.lists(st.integers(-1, 19), max_size=2))
def test_an_answer_is_the_same_however_often_it_moves(dies_after):
    replicas = Replicas(dies_after)
    deltas = asyncio.run(answer(fleet_of(replicas), request()))
    assert tokens(deltas) == fake_answer(PROMPT, request().params, 5, 20)
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == [FinishReason.LENGTH]


def test_a_request_that_is_lost_three_times_ends_with_an_error_that_says_so():
    replicas = Replicas([3, 3, 3])
    engine = fleet_of(replicas)
    with pytest.raises(GenerationFailed, match="lost with 3 replicas"):
        asyncio.run(answer(engine, request()))
    assert (len(replicas.requests), engine.num_moves, engine.num_lost) == (3, 2, 1)


def test_an_answer_goes_on_only_where_the_weights_are_those_that_began_it():
    replicas = Replicas([3], layouts=["w8a8", "bf16", "w8a8"])
    engine = fleet_of(replicas)
    assert tokens(asyncio.run(answer(engine, request()))) == fake_answer(PROMPT, request().params, 5, 20)
    assert [len(asked.answer) for asked in replicas.requests] == [0, 3, 3]
    replicas = Replicas([3], layouts=["w8a8", "bf16", "bf16"])
    with pytest.raises(GenerationFailed, match="lost with 3 replicas"):
        asyncio.run(answer(fleet_of(replicas), request()))


def test_without_a_seed_one_is_drawn_and_kept_when_it_moves():
    replicas = Replicas([4])
    deltas = asyncio.run(answer(fleet_of(replicas), request(seed=None)))
    seeds = {asked.params.seed for asked in replicas.requests}
    assert len(replicas.requests) == 2
    assert len(seeds) == 1
    assert None not in seeds
    assert tokens(deltas) == fake_answer(PROMPT, replicas.requests[0].params, seeds.pop(), 20)


def test_the_router_is_told_where_not_to_go_and_what_the_weights_must_be_like():
    replicas = Replicas([3, 2])
    asyncio.run(answer(fleet_of(replicas), request()))
    assert [hint.avoid for hint in replicas.hints] == [[], ["replica-0"], ["replica-0", "replica-1"]]
    assert [hint.layout for hint in replicas.hints] == ["", "w8a8", "w8a8"]


def test_hints_hold_the_hashes_of_the_prefix_cache():
    replicas = Replicas([4])
    asyncio.run(answer(fleet_of(replicas), Request("r", PROMPT, request().params, cache_salt="s")))
    for hint, asked in zip(replicas.hints, replicas.requests, strict=True):
        hashes: list[bytes] = []
        extend_chain(hashes, (*asked.prompt_ids, *asked.answer), 16, adapter_salt("s", ""))
        assert hint.prefix == packed(hashes)
        assert hint.num_tokens == len(asked.prompt_ids) + len(asked.answer)


def test_hints_tell_images_apart_and_requests_bring_them():
    replicas, seen = Replicas([]), (*PROMPT[:20], *[7] * 16, *PROMPT[20:])
    engine = fleet_of(replicas)
    for number, data in enumerate((b"red", b"blue", b"red")):
        sight = Sight((*PROMPT[:20], 1, *PROMPT[20:]), (Image(data, "image/png"),))
        asyncio.run(answer(engine, replace(request(), id=f"r{number}", prompt_ids=seen, sight=sight)))
    red, blue, again = (keys_of(hint.prefix) for hint in replicas.hints)
    assert red == again
    assert red[0] == blue[0]  # the 16 tokens before the image
    assert not set(red[1:]) & set(blue[1:])
    assert replicas.requests[1].sight.images[0].data == b"blue"


def test_a_prompt_that_must_be_computed_whole_has_no_prefix():
    replicas = Replicas()
    asyncio.run(answer(fleet_of(replicas), request(prompt_logprobs=0)))
    assert replicas.hints[0].prefix == b""


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (BadRequest("prompt", "is bad"), BadRequest),
        (Overloaded("full"), Overloaded),
    ],
)
def test_what_a_replica_refuses_is_refused(error, raised):
    replicas = Replicas(refusals=[error])
    with pytest.raises(raised, match=str(error)):
        asyncio.run(answer(fleet_of(replicas), request()))
    assert len(replicas.requests) == 1


def test_a_replica_that_stops_passes_its_requests_on():
    replicas = Replicas(refusals=[Unavailable("the server is stopping")])
    deltas = asyncio.run(answer(fleet_of(replicas), request()))
    assert len(tokens(deltas)) == 20


def test_when_nobody_takes_it_up_the_answer_is_503():
    with pytest.raises(Unavailable, match="no replica answers"):
        asyncio.run(answer(fleet_of(Replicas(is_silent=True), patience_s=0.01), request()))


def test_who_goes_away_ends_the_call():
    async def leave(replicas):
        engine = fleet_of(replicas)
        with engine.open([request()]) as feed:
            await feed.get()
        async with asyncio.timeout(WAIT_S):
            while engine._tasks:
                await asyncio.sleep(0)

    replicas = Replicas()
    asyncio.run(leave(replicas))
    assert replicas.num_cancelled == 1


def test_a_request_that_is_aborted_ends_once_with_what_it_has():
    async def abort(engine):
        with engine.open([request()]) as feed:
            found = [delta for _, delta in await feed.get()]
            engine.abort("r")
            engine.abort("r")
            while (step := await feed.get()) is not None:
                found += [delta for _, delta in step]
        return found

    found = asyncio.run(abort(fleet_of(Replicas())))
    assert [delta.finish_reason for delta in found if delta.finish_reason] == [FinishReason.ABORT]


def test_one_id_is_in_use_once():
    async def twice(engine):
        with engine.open([request()]):
            engine.open([request()])

    with pytest.raises(BadRequest, match="in use"):
        asyncio.run(twice(fleet_of(Replicas())))


def test_a_fleet_that_ends_says_so_to_who_waits():
    async def close(engine):
        with engine.open([request()]) as feed:
            await feed.get()
            engine.close()
            while await feed.get() is not None:
                pass

    engine = fleet_of(Replicas())
    with pytest.raises(Unavailable, match="stopping"):
        asyncio.run(close(engine))
    with pytest.raises(Unavailable, match="stopping"):
        asyncio.run(close(engine))


def test_it_is_ended_from_another_thread_too():
    async def close(engine):
        engine.start(asyncio.get_running_loop())
        with engine.open([request()]) as feed:
            await feed.get()
            await asyncio.to_thread(engine.close)
            while await feed.get() is not None:
                pass

    with pytest.raises(Unavailable, match="stopping"):
        asyncio.run(close(fleet_of(Replicas())))


@pytest.mark.parametrize(("threshold", "is_apart"), [(len(PROMPT), True), (len(PROMPT) + 1, False)])
def test_a_long_prompt_is_computed_apart_and_its_answer_is_the_same(threshold, is_apart):
    decode, prefill = Replicas(), Replicas(only_first=True)
    deltas = asyncio.run(answer(fleet_of(decode, prefill, threshold), request()))
    assert tokens(deltas) == fake_answer(PROMPT, request().params, 5, 20)
    assert (len(prefill.requests), len(decode.requests)) == (is_apart, 1)
    assert len(decode.requests[0].answer) == is_apart


def test_an_answer_that_ends_with_its_first_token_ends_where_its_prompt_was():
    decode, prefill = Replicas(), Replicas(only_first=True)
    deltas = asyncio.run(answer(fleet_of(decode, prefill), request(max_tokens=1)))
    assert (len(deltas), len(decode.requests)) == (1, 0)


def test_a_prefill_replica_that_dies_leaves_the_prompt_to_the_others():
    decode, prefill = Replicas(), Replicas([-1], only_first=True)
    deltas = asyncio.run(answer(fleet_of(decode, prefill), request()))
    assert len(tokens(deltas)) == 20
    assert (len(prefill.requests), len(decode.requests)) == (1, 1)


@pytest.mark.parametrize("asked", [request(max_tokens=0), request(prompt_logprobs=0)])
def test_who_wants_something_of_every_prompt_token_gets_it_in_one_place(asked):
    engine = fleet_of(Replicas(), Replicas(only_first=True))
    assert not engine._is_long(asked)


def test_a_stream_that_ends_before_its_answer_is_a_lost_one():
    replicas = Replicas(only_first=True)
    with pytest.raises(GenerationFailed, match="lost with 3 replicas"):
        asyncio.run(answer(fleet_of(replicas), request()))


def test_replicas_of_another_model_answer_nobody_who_asked_for_this_one():
    replicas = Replicas(serves="other files")
    with pytest.raises(Unavailable, match="deployed anew with another model"):
        asyncio.run(answer(fleet_of(replicas), request()))


def test_adapters_have_the_numbers_that_replicas_gave_them():
    about = About("r", "w8a8", "1", "n", 1, 256, INFO, ["aa", "bb"])
    engine = FleetEngine(about, Ways(Way(Replicas().call, Board())))
    loaded = [engine.preload_adapter(path) for path in ("/one", "/two")]
    assert [(each.id, each.path, each.info.digest) for each in loaded] == [(1, "/one", "aa"), (2, "/two", "bb")]
