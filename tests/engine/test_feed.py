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


def test_a_reader_that_gathers_is_woken_for_the_first_delta_then_for_so_many_and_for_the_end():
    async def read(feeds: Feeds, feed: Feed) -> None:
        feed.gather(3)
        came = []
        for number in range(9):
            waiting = asyncio.ensure_future(feed.get())
            end = FinishReason.LENGTH if number == 8 else None
            feeds.put([("a", Delta("a", str(number), finish_reason=end))])
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            if waiting.done():
                came.append("".join(text for _, text in texts(waiting.result())))
                assert len(feed.times_s) == len(came[-1])
                assert sorted(feed.times_s) == feed.times_s
            else:
                waiting.cancel()
        assert came == ["0", "123", "456", "78"]
        assert await feed.get() is None

    reading(read, "a")


def test_of_several_requests_a_reader_that_gathers_gets_each_first_and_each_last_delta_at_once():
    async def read(feeds: Feeds, feed: Feed) -> None:
        feed.gather(2)
        feeds.put([("a", Delta("a", "1"))])
        assert texts(await feed.get()) == [(0, "1")]
        feeds.put([("a", Delta("a", "2")), ("b", Delta("b", "1"))])
        assert texts(await feed.get()) == [(0, "2"), (1, "1")]
        waiting = asyncio.ensure_future(feed.get())
        for number in "345":
            feeds.put([("a", Delta("a", number))])
            await asyncio.sleep(0)
            assert not waiting.done()
        feeds.put([("b", Delta("b", "2", finish_reason=FinishReason.EOS))])
        assert texts(await waiting) == [(0, "3"), (0, "4"), (0, "5"), (1, "2")]
        feeds.put([("a", Delta("a", "6"))])
        feeds.put([("a", Delta("a", "7"))])
        assert texts(await feed.get()) == [(0, "6"), (0, "7")]

    reading(read, "a", "b")


def test_what_is_gathered_comes_before_an_error_and_when_a_stream_is_silent():
    async def read(feeds: Feeds, feed: Feed) -> None:
        feed.gather(100)
        feeds.put([("a", Delta("a", "1"))])
        assert texts(await feed.get()) == [(0, "1")]
        feed.tell_silence(0.01)
        feeds.put([("a", Delta("a", "2"))])
        assert texts(await feed.get()) == [(0, "2")]
        feeds.put([("a", Delta("a", "3"))])
        feeds.put([("a", GenerationFailed("it broke"))])
        assert texts(await feed.get()) == [(0, "3")]
        with pytest.raises(GenerationFailed):
            await feed.get()
        feed.__exit__()

    reading(read, "a")
