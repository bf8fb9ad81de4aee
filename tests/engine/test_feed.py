"""Feed: how a reader receives the deltas of the engine's steps, whether it keeps up or not."""

import asyncio
from collections.abc import Callable

import pytest

from kvloom.contract.errors import GenerationFailed, ServingError
from kvloom.contract.request import Delta, FinishReason, Request
from kvloom.engine.feed import Feed, Feeds, Step


def reading(read: Callable[[Feeds, Feed], object], *ids: str) -> None:
    """Runs `read` on an event loop, with a feed of requests that have these ids."""

    async def run() -> None:
        feeds = Feeds()
        feed = Feed([Request(id, (1,)) for id in ids], lambda left: None)
        feeds.add(feed)
        await read(feeds, feed)  # type: ignore[misc]

    asyncio.run(run())


def texts(step: Step | None) -> list[tuple[int, str]]:
    assert step is not None
    return [(index, delta.text) for index, delta in step]


def test_what_one_step_brings_is_read_at_once_by_who_waits_for_it():
    async def read(feeds: Feeds, feed: Feed) -> None:
        waiting = asyncio.ensure_future(feed.get())
        await asyncio.sleep(0)
        feeds.put([("a", Delta("a", "1")), ("b", Delta("b", "2"))])
        assert texts(await waiting) == [(0, "1"), (1, "2")]

    reading(read, "a", "b")


def test_steps_that_a_slow_reader_has_missed_come_together_in_their_order():
    async def read(feeds: Feeds, feed: Feed) -> None:
        for i in range(3):
            feeds.put([("a", Delta("a", str(i)))])
        feeds.put([("a", Delta("a", "end", finish_reason=FinishReason.EOS))])
        assert texts(await feed.get()) == [(0, "0"), (0, "1"), (0, "2"), (0, "end")]
        assert await feed.get() is None

    reading(read, "a")


def test_an_error_comes_behind_what_was_said_before_it_and_nothing_behind_the_error():
    async def read(feeds: Feeds, feed: Feed) -> None:
        feeds.put([("a", Delta("a", "said"))])
        feeds.put([("a", Delta("a", finish_reason=FinishReason.ERROR, error="it broke")), ("b", Delta("b", "late"))])
        assert texts(await feed.get()) == [(0, "said")]
        for _ in range(2):
            with pytest.raises(GenerationFailed, match="it broke"):
                await feed.get()

    reading(read, "a", "b")


def test_of_two_errors_the_first_is_told():
    async def read(feeds: Feeds, feed: Feed) -> None:
        feeds.put([("a", ServingError("first")), ("b", ServingError("second"))])
        with pytest.raises(ServingError, match="first"):
            await feed.get()

    reading(read, "a", "b")


def test_silence_is_an_empty_step_and_what_comes_ends_it():
    async def read(feeds: Feeds, feed: Feed) -> None:
        feed.tell_silence(0.01)
        assert await feed.get() == []
        assert await feed.get() == []
        feeds.put([("a", Delta("a", "back"))])
        assert texts(await feed.get()) == [(0, "back")]
        feed.__exit__()

    reading(read, "a")


def test_who_follows_is_told_of_what_is_there_and_of_what_comes_and_takes_it_without_waiting():
    async def read(feeds: Feeds, feed: Feed) -> None:
        found: list[Step | None] = []
        feeds.put([("a", Delta("a", "before"))])
        feed.follow(lambda: found.append(feed.take()))
        assert [texts(step) for step in found] == [[(0, "before")]]
        assert feed.take() == []
        feeds.put([("a", Delta("a", "end", finish_reason=FinishReason.EOS))])
        assert texts(found[-1]) == [(0, "end")]
        assert feed.take() is None

    reading(read, "a")


def test_who_follows_hears_of_an_error_behind_what_was_said():
    async def read(feeds: Feeds, feed: Feed) -> None:
        feeds.put([("a", Delta("a", "said"))])
        feeds.put([("a", Delta("a", finish_reason=FinishReason.ERROR, error="it broke"))])
        heard: list[bool] = []
        feed.follow(lambda: heard.append(True))
        assert heard == [True]
        assert texts(feed.take()) == [(0, "said")]
        with pytest.raises(GenerationFailed, match="it broke"):
            feed.take()

    reading(read, "a")
