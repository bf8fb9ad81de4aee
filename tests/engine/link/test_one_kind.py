"""OneKind: requests of one kind run together, those of another kind wait."""

import asyncio
from collections.abc import Awaitable, Callable

from kvloom.vllm.one_kind import OneKind


class Visit:
    """A task that enters, stays inside until it is told to leave, and is listed in `inside` meanwhile."""

    def __init__(self, company: OneKind, kind: str, inside: list[str]) -> None:
        self.told = asyncio.Event()
        self.task = asyncio.ensure_future(self._visit(company, kind, inside))

    async def _visit(self, company: OneKind, kind: str, inside: list[str]) -> None:
        async with company.among(kind):
            inside.append(kind)
            await self.told.wait()
            inside.remove(kind)

    async def leave(self) -> None:
        self.told.set()
        await settled()


async def settled() -> None:
    """Returns when all tasks that can continue have done so."""
    for _ in range(10):
        await asyncio.sleep(0)


def play(body: Callable[[Callable[[str], Visit], list[str]], Awaitable[None]]) -> None:
    """Runs `body(comes, inside)`: `comes` starts a visit of a kind, `inside` lists the kinds of those inside."""

    async def main() -> None:
        company, inside, came = OneKind(), [], []

        def comes(kind: str) -> Visit:
            came.append(Visit(company, kind, inside))
            return came[-1]

        await body(comes, inside)
        for visit in came:
            visit.task.cancel()

    asyncio.run(main())


def test_another_kind_waits_until_the_last_has_left():
    async def body(comes, inside):
        first, second = comes("a"), comes("a")
        comes("b")
        await settled()
        assert inside == ["a", "a"]
        await first.leave()
        assert inside == ["a"]
        await second.leave()
        assert inside == ["b"]

    play(body)


def test_who_comes_later_does_not_overtake_who_waits():
    async def body(comes, inside):
        first = comes("a")
        waiting = comes("b")
        comes("a")
        await settled()
        assert inside == ["a"]
        await first.leave()
        assert inside == ["b"]
        await waiting.leave()
        assert inside == ["a"]

    play(body)


def test_who_no_longer_waits_lets_the_next_in_and_is_not_waited_for():
    async def body(comes, inside):
        first = comes("a")
        gone = comes("b")
        comes("a")
        await settled()
        gone.task.cancel()
        await settled()
        assert inside == ["a", "a"]
        await first.leave()
        assert inside == ["a"]

    play(body)


def test_who_is_let_in_as_it_is_cancelled_is_not_inside():
    async def body(comes, inside):
        first = comes("a")
        gone = comes("b")
        comes("c")
        await settled()
        first.told.set()
        while not first.task.done():
            await asyncio.sleep(0)
        gone.task.cancel()
        await settled()
        assert inside == ["c"]

    play(body)


def test_no_kind_waits_for_nobody_and_nobody_for_it():
    async def body(comes, inside):
        comes("a")
        comes("")
        comes("b")
        await settled()
        assert inside == ["a", ""]

    play(body)
