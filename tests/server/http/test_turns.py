"""Whose body is read next."""

import asyncio
from collections.abc import Sequence

import pytest

from kvloom.server.http.turns import LONG_BYTES, Turns

SHORT, LONG = 9 << 10, 4 << 20


class _Bodies:
    """Bodies that come at given times and are read until they are told to end."""

    def __init__(self, num: int) -> None:
        self.now_s = 0.0
        self.begun: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._turns = Turns(num, lambda: self.now_s)

    async def come(self, name: str, num_bytes: int, at_s: float = 0.0) -> None:
        self.now_s, self.ends[name] = at_s, asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._read(name, num_bytes))
        await _settled()

    async def _read(self, name: str, num_bytes: int) -> None:
        async with self._turns.turn(num_bytes):
            self.begun.append(name)
            await self.ends[name].wait()

    async def end(self, *names: str) -> None:
        for name in names:
            self.ends[name].set()
            await _settled()

    async def leave(self, name: str) -> None:
        self.tasks[name].cancel()
        await _settled()


async def _settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize("num", [2, 4])
def test_a_short_body_never_waits_for_long_ones(num: int):
    async def run() -> list[str]:
        bodies = _Bodies(num)
        for i in range(8):
            await bodies.come(f"long{i}", LONG)
        await bodies.come("short", SHORT, at_s=0.3)
        return bodies.begun

    assert asyncio.run(run()) == [*(f"long{i}" for i in range(num - 1)), "short"]


def _order(came: Sequence[tuple[str, int, float]]) -> list[str]:
    """In which order bodies are read by one worker, which is taken until all of them have come."""

    async def run() -> list[str]:
        bodies = _Bodies(1)
        await bodies.come("first", SHORT)
        for name, num_bytes, at_s in came:
            await bodies.come(name, num_bytes, at_s)
        await bodies.end(*bodies.ends)
        for _ in came:
            await bodies.end(*bodies.begun)
        return bodies.begun[1:]

    return asyncio.run(run())


def test_a_short_body_overtakes_a_long_one():
    assert _order([("long", LONG, 0.0), ("short", SHORT, 0.3)]) == ["short", "long"]


def test_a_long_body_that_has_waited_is_overtaken_no_more():
    assert _order([("long", LONG, 0.0), ("short", SHORT, 60.0)]) == ["long", "short"]


def test_bodies_of_one_length_are_read_in_order():
    assert _order([("a", SHORT, 0.0), ("b", SHORT, 0.1), ("c", SHORT, 0.2)]) == ["a", "b", "c"]


def test_who_leaves_while_waiting_takes_no_turn():
    async def run() -> list[str]:
        bodies = _Bodies(1)
        for name in ("first", "gone", "next"):
            await bodies.come(name, SHORT)
        await bodies.leave("gone")
        await bodies.end("first")
        return bodies.begun

    assert asyncio.run(run()) == ["first", "next"]


def test_who_leaves_while_being_read_gives_the_turn_back():
    async def run() -> list[str]:
        bodies = _Bodies(2)
        await bodies.come("long", LONG_BYTES + 1)
        await bodies.come("next", LONG_BYTES + 1)
        await bodies.leave("long")
        return bodies.begun

    assert asyncio.run(run()) == ["long", "next"]


def test_who_leaves_in_the_moment_of_the_turn_gives_it_back():
    async def run() -> list[str]:
        bodies = _Bodies(1)
        for name in ("first", "gone", "next"):
            await bodies.come(name, SHORT)
        bodies.ends["first"].set()
        while "first" in bodies.begun and not bodies.tasks["first"].done():
            await asyncio.sleep(0)
        bodies.tasks["gone"].cancel()
        await _settled()
        return bodies.begun

    assert asyncio.run(run())[-1] == "next"


@pytest.mark.parametrize("leaves_first", [True, False])
def test_a_body_that_leaves_as_a_turn_ends_takes_none(leaves_first: bool):
    async def run() -> list[str]:
        bodies = _Bodies(1)
        for name in ("one", "two", "three"):
            await bodies.come(name, SHORT)
        if leaves_first:
            bodies.tasks["two"].cancel()
        bodies.ends["one"].set()  # both are told in the same round of the loop, one before the other
        bodies.tasks["two"].cancel()
        await _settled()
        await bodies.tasks["one"]
        await bodies.end("three")
        return bodies.begun

    assert asyncio.run(run()) == ["one", "three"]
