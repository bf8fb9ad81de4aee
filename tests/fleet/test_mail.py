"""Deltas by mailbox are complete and in order, even if messages overtake each other; they are lost only together
with their replica. Without Ray.
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.contract.request import Delta, FinishReason, Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.feed import Feed
from kvloom.fleet.args import FleetArgs, Mock
from kvloom.fleet.engine import FleetEngine, Way, Ways
from kvloom.fleet.journey import Journey
from kvloom.fleet.lost import ReplicaLost
from kvloom.fleet.mail import outbox
from kvloom.fleet.mail.mailroom import Mailroom, Visit
from kvloom.fleet.plan import make_plan
from kvloom.fleet.replica import EngineReplica
from kvloom.fleet.routing.board import Board, View
from kvloom.fleet.wire import Asked, Brought, Fault, Hello, Opening, decode_item, decode_letters, encode
from kvloom.rank.fake import fake_answer
from tests.support.configs import mock_document
from tests.support.waiting import WAIT_S

PROMPT = tuple(b"a prompt of some blocks, which is to be cached")
PARAMS = SamplingParams(max_tokens=40, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def replica(loop, tmp_path_factory):
    """Without guesses, which would bring an answer that was seen before in two items."""
    config = tmp_path_factory.mktemp("fleet") / "config.json"
    config.write_text(json.dumps(mock_document(numSpeculativeTokens=0)))
    made = EngineReplica(make_plan(FleetArgs(config=str(config), backend="fake", mock=Mock(step_ms=3))), "r1", "n1")
    loop.run(made.start())
    yield made
    made.close()


class Ingress:
    """A FleetEngine in front of one replica. The i-th mailbox is lost after `dies_after[i]` items, or before
    the first item with an end.
    """

    def __init__(self, replica: EngineReplica, dies_after: tuple[int, ...] = ()) -> None:
        self.dies_after = list(dies_after)
        self.num_items, self.num_opened = 0, 0
        board = Board()
        board.views = [View("r1")]
        self._replica = replica
        self.engine = FleetEngine(replica.about(), Ways(Way(self._stream, board, self._post)))

    async def _stream(self, data: bytes, hint: bytes) -> AsyncGenerator[bytes]:
        async with aclosing(self._replica.stream(data)) as items:
            async for item in items:
                yield item

    async def _post(self, data: bytes, hint: bytes) -> AsyncGenerator[bytes]:
        self.num_opened += 1
        dies = bool(self.dies_after)
        left = self.dies_after.pop(0) if dies else 0
        async with aclosing(self._replica.post(data)) as items:
            async for item in items:
                if dies and (not left or has_end(item)):
                    raise ReplicaLost("killed")
                left -= 1
                self.num_items += 1
                yield item

    async def answer(self, number: int) -> list[Delta]:
        return [delta async for delta in self.engine.stream(Request(f"q{number}", PROMPT, PARAMS))]

    async def answers(self, count: int) -> list[list[Delta]]:
        found = await asyncio.gather(*(self.answer(number) for number in range(count)))
        self.engine.close()
        return found


def has_end(item: bytes) -> bool:
    return any(letter.deltas[-1].finish_reason for letter in decode_letters(item))


def tokens(deltas) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def test_what_steps_bring_to_all_requests_comes_together(loop, replica):
    ingress = Ingress(replica)
    found = loop.run(ingress.answers(8))
    assert [tokens(deltas) for deltas in found] == [fake_answer(PROMPT, PARAMS, 5, 40)] * 8
    assert [[d.finish_reason for d in deltas if d.finish_reason] for deltas in found] == [[FinishReason.LENGTH]] * 8
    assert 0 < ingress.num_items < 40


@pytest.mark.parametrize("dies_after", [(0,), (2,), (1, 1)])
def test_a_lost_mailbox_is_a_lost_replica_and_costs_no_token(loop, replica, dies_after):
    ingress = Ingress(replica, dies_after)
    found = loop.run(ingress.answers(4))
    assert [tokens(deltas) for deltas in found] == [fake_answer(PROMPT, PARAMS, 5, 40)] * 4
    assert 1 <= ingress.engine.num_moves <= 4 * len(dies_after)
    assert ingress.engine.num_lost == 0


def test_a_mailbox_that_is_full_is_followed_by_another_and_nothing_moves(loop, replica, monkeypatch):
    monkeypatch.setattr(outbox, "MAX_ITEMS", 3)
    ingress = Ingress(replica)
    found = loop.run(ingress.answers(6))
    assert [tokens(deltas) for deltas in found] == [fake_answer(PROMPT, PARAMS, 5, 40)] * 6
    assert (ingress.num_opened > 1, ingress.engine.num_moves) == (True, 0)


@given(st.permutations(range(6)), st.lists(st.integers(1, 3), min_size=6, max_size=6))
def test_letters_that_overtake_each_other_are_told_in_order(order, lengths):
    request = Request("r", (1,), PARAMS)
    feed = Feed([request], lambda feed: None)
    visit = Visit(Journey(request), feed)
    starts = [sum(lengths[:index]) for index in range(6)]
    for index in order:
        end = FinishReason.LENGTH if index == 5 else None
        deltas = [Delta("r", token_ids=(starts[index] + i,)) for i in range(lengths[index] - 1)]
        visit.take(starts[index], [*deltas, Delta("r", token_ids=(starts[index] + len(deltas),), finish_reason=end)])
    told = [delta for _, delta in feed.take() or ()]
    assert tokens(told) == list(range(sum(lengths)))
    assert visit.is_over


def test_a_letter_brings_what_is_new_and_says_how_much_came_before():
    request = Request("r", (1,), PARAMS)

    async def send() -> tuple[list[tuple[int, int, list[int]]], int]:
        box, feed = outbox.Outbox(), Feed([request], lambda feed: None)
        carried = asyncio.ensure_future(box.carry(7, feed, 3))
        letters = []
        async with aclosing(box.items()) as items:
            for ids in ((1,), (2, 3)):
                await asyncio.sleep(0)
                for id in ids:
                    end = FinishReason.LENGTH if id == 3 else None
                    feed.put("r", Delta("r", token_ids=(id,), finish_reason=end))
                letters += decode_letters(await anext(items))
        return [(letter.key, letter.at, tokens(letter.deltas)) for letter in letters], await carried

    assert asyncio.run(send()) == ([(7, 3, [1]), (7, 4, [2, 3])], 6)


def test_with_a_mailbox_those_at_its_replica_are_lost_and_no_others():
    request = Request("r", (1,), PARAMS)

    async def killed(*_: bytes) -> AsyncGenerator[bytes]:
        raise ReplicaLost("killed")
        yield b""

    async def lose() -> list[bool]:
        room, visits = Mailroom(killed), []
        for replica in ("r1", "r2", "r1"):
            visits.append(Visit(Journey(request, replica=replica), Feed([request], lambda feed: None)))
            room.enter(visits[-1])
        room.open("r1")
        await room._boxes["r1"]
        return [visit._is_lost for visit in visits]

    assert asyncio.run(lose()) == [True, False, True]


def test_an_answer_waits_for_letters_that_are_still_on_their_way():
    request = Request("r", (1,), PARAMS)

    async def wait() -> tuple[bool, bool]:
        visit = Visit(Journey(request), Feed([request], lambda feed: None))
        waiting = asyncio.create_task(visit.until_told(2))
        visit.take(0, [Delta("r")])
        await asyncio.sleep(0)
        before = waiting.done()
        visit.take(1, [Delta("r", finish_reason=FinishReason.LENGTH)])
        await waiting
        return before, visit.is_over

    assert asyncio.run(wait()) == (False, True)


def asked(number: int) -> bytes:
    return encode(Asked(Request(f"own{number}", PROMPT, PARAMS), "box", number))


async def read_until_carried(replica, number: int, stream) -> asyncio.Task:
    """Read a stream's first deltas and wait until the mailbox carries the others; a task that reads the next item."""
    assert isinstance(decode_item(await anext(stream)), Hello)
    assert isinstance(decode_item(await anext(stream)), Brought)
    rest = asyncio.ensure_future(anext(stream))
    async with asyncio.timeout(WAIT_S):
        while number not in replica._outboxes["box"]._carried:
            await asyncio.sleep(0)
    return rest


def test_who_goes_away_leaves_the_mailbox(loop, replica):
    async def leave() -> tuple[int, dict]:
        async with aclosing(replica.post(encode(Opening("box", "r1")))) as post:
            first_item = asyncio.ensure_future(anext(post))
            await asyncio.sleep(0)
            async with aclosing(replica.stream(asked(1))) as stream:
                rest = await read_until_carried(replica, 1, stream)
                letters = decode_letters(await first_item)
                rest.cancel()
                await asyncio.wait([rest])
            return letters[0].key, dict(replica._outboxes["box"]._carried)

    assert loop.run(leave()) == (1, {})


def test_a_mailbox_that_nobody_reads_any_more_passes_its_requests_on(loop, replica):
    async def lose() -> Fault:
        post = replica.post(encode(Opening("box", "r1")))
        first_item = asyncio.ensure_future(anext(post))
        await asyncio.sleep(0)
        async with aclosing(replica.stream(asked(2))) as stream:
            rest = await read_until_carried(replica, 2, stream)
            await first_item
            await post.aclose()
            return decode_item(await rest)

    assert loop.run(lose()) == Fault("Unavailable", "its mailbox was lost")
    assert replica._outboxes == {}


def test_a_mailbox_without_requests_ends_so_that_a_replica_may(loop, replica, monkeypatch):
    monkeypatch.setattr(outbox, "_LINGER_S", 0.01)

    async def read() -> list[bytes]:
        return [item async for item in replica.post(encode(Opening("box", "r1")))]

    assert loop.run(read()) == []
    assert replica._outboxes == {}


def test_a_mailbox_that_was_meant_for_another_replica_is_not_filled(loop, replica):
    async def open() -> tuple[bool, dict]:
        post = replica.post(encode(Opening("box", "r2")))
        first_item = asyncio.ensure_future(anext(post, None))
        await asyncio.sleep(0)
        is_over, filled = first_item.done(), dict(replica._outboxes)
        first_item.cancel()
        await asyncio.wait([first_item])
        return is_over, filled

    assert loop.run(open()) == (True, {})
