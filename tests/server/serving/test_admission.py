"""Admission: maxLinkNum requests are served, twice as many wait in order, and no slot is ever lost."""

import asyncio
import random

import pytest

from kvloom.contract.errors import Overloaded
from kvloom.server.serving.admission import Admission, Ticket
from tests.support.waiting import WAIT_S


def test_whatever_comes_goes_stops_or_is_cancelled_slots_are_never_exceeded_nor_lost():
    async def run(seed: int) -> None:
        dice = random.Random(seed)
        admission = Admission(limit=3)
        served, refused = 0, 0

        async def one(ticket: Ticket) -> None:
            nonlocal served, refused
            try:
                async with admission.slot(ticket):
                    if not ticket.is_stopped:
                        served += 1
                        assert served <= 3
                        try:
                            for _ in range(dice.choice((1, 40))):
                                await asyncio.sleep(0)
                        finally:
                            served -= 1
            except Overloaded:
                refused += 1

        tasks: list[tuple[Ticket, asyncio.Task[None]]] = []
        for _ in range(60):
            ticket = Ticket()
            tasks.append((ticket, asyncio.create_task(one(ticket))))
            fate = dice.random()
            if fate < 0.2:
                await asyncio.sleep(0)
                dice.choice(tasks)[0].stop()
            elif fate < 0.4:
                await asyncio.sleep(0)
                dice.choice(tasks)[1].cancel()
            assert admission.num_active <= 9
        async with asyncio.timeout(WAIT_S):
            ends = await asyncio.gather(*(task for _, task in tasks), return_exceptions=True)
        assert not any(isinstance(end, AssertionError) for end in ends)
        assert (admission.num_active, admission.num_waiting, admission.num_tokens) == (0, 0, 0)
        # a request takes a free slot without waiting
        async with asyncio.timeout(0), admission.slot(Ticket()), admission.slot(Ticket()), admission.slot(Ticket()):
            pass

    for seed in range(50):
        asyncio.run(run(seed))


def test_those_who_wait_are_served_in_order_and_the_next_is_refused():
    async def run() -> list[int]:
        admission, order = Admission(limit=1), []

        async def one(number: int) -> None:
            async with admission.slot(Ticket()):
                order.append(number)
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(one(number)) for number in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="1 requests are being served and 2 wait"):
            await one(3)
        await asyncio.gather(*tasks)
        return order

    assert asyncio.run(run()) == [0, 1, 2]


def test_prompt_tokens_are_bounded_too_but_one_long_prompt_alone_is_let_in():
    async def run() -> None:
        admission = Admission(limit=10, max_tokens=100)
        async with admission.slot(Ticket(150)):
            assert admission.is_full
            with pytest.raises(Overloaded, match="150 prompt tokens are being served or wait"):
                async with admission.slot(Ticket(1)):
                    pass
        async with admission.slot(Ticket(60)), admission.slot(Ticket(40)):
            assert admission.num_tokens == 100
        async with admission.slot(Ticket(60)):
            with pytest.raises(Overloaded, match="60 prompt tokens are being served or wait"):
                async with admission.slot(Ticket(41)):
                    pass

    asyncio.run(run())
