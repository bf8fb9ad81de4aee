"""Feed: the deltas of one or more requests on their way from the engine's thread to one reader on the loop."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from kvloom.contract.errors import BadRequest, GenerationFailed, ServingError
from kvloom.contract.request import Delta, FinishReason, Request

log = logging.getLogger(__name__)

_MOST_TOGETHER = 64  # deltas that wait for others: the reader's loop must not be busy with them for long

Step = list[tuple[int, Delta]]  # what arrived since the last read: (index of the request, its delta)


class Feed:
    """Deltas of one reader's requests: those of one engine step together, or of several when the reader was slower.

    Owned by the loop. A context manager: leaving it cancels the requests that still run; their blocks are free within
    one step.
    """

    def __init__(self, requests: Sequence[Request], drop: Callable[["Feed"], None]) -> None:
        self.index_of = {request.id: index for index, request in enumerate(requests)}
        self._drop = drop
        self._unread: Step = []
        self._times_s: list[float] = []  # of the deltas in _unread
        self.times_s: list[float] = []  # when each delta of the last step read came, as time.perf_counter()
        self._least = 1  # deltas of each request that a reader is woken for
        self._unheard = set(self.index_of.values())  # requests without a delta yet
        self._is_due = False  # the reader is to have what has arrived
        self._error: ServingError | None = None  # raised after all deltas before it were read
        self._is_silence_due = False
        self._reader: asyncio.Future[None] | None = None
        self._heard: Callable[[], None] | None = None
        self._num_open = len(requests)
        self._heard_s = 0.0
        self._ticking: asyncio.TimerHandle | None = None
        self.is_left = False  # the reader has left

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *error: object) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
        self._drop(self)

    def tell_silence(self, every_s: float) -> None:
        """From now on `get` returns an empty step after `every_s` seconds without deltas."""
        self._heard_s = time.monotonic()

        def look() -> None:
            left_s = self._heard_s + every_s - time.monotonic()
            if left_s <= 0:
                self._heard_s, left_s, self._is_silence_due = time.monotonic(), every_s, True
                self._wake()
            self._ticking = asyncio.get_running_loop().call_later(left_s, look)

        look()

    def gather(self, num_deltas: int) -> None:
        """From now on `get` waits for so many deltas of each request that has not ended; the first one of a request,
        its last one, an error and silence end the wait.
        """
        self._least = num_deltas

    def put(self, request_id: str, item: Delta | ServingError, time_s: float | None = None) -> None:
        """Add a delta of a request; `time_s`: when it came, None = now.

        An error ends the feed for all of its requests.
        """
        if isinstance(item, ServingError):
            self._error = self._error or item
        elif item.finish_reason is FinishReason.ERROR:
            error = item.error or "the model failed"
            self._error = self._error or (BadRequest("", error) if item.is_callers else GenerationFailed(error))
        elif self._error is None:
            index = self.index_of[request_id]
            self._unread.append((index, item))
            self._times_s.append(time.perf_counter() if time_s is None else time_s)
            if self._least > 1 and not self._must_tell(index, item):
                return
            self._is_due = True
        self._wake()

    def _must_tell(self, index: int, delta: Delta) -> bool:
        """Whether the reader is to have this delta, and all before it, at once."""
        is_first = index in self._unheard
        self._unheard.discard(index)
        most = min(_MOST_TOGETHER, self._least * self._num_open)
        return is_first or delta.finish_reason is not None or len(self._unread) >= most

    async def get(self) -> Step | None:
        """Wait for deltas, and return all that arrived since the last call; None when every request has ended.

        `times_s` says when each came.

        Raises BadRequest when a request can never run, GenerationFailed when the model failed while it ran.
        """
        while self._num_open and not (self._is_due or self._error or self._is_silence_due):
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self.take()

    def follow(self, heard: Callable[[], None] | None) -> None:
        """Call `heard` whenever deltas arrive (now, if some are there) instead of waiting in `get`; `take` returns
        them.
        """
        self._heard = heard
        if self._unread or self._error:
            self._wake()

    def take(self) -> Step | None:
        """As `get` without waiting: an empty step when nothing has arrived."""
        if not self._num_open:
            return None
        step, self._unread, self._is_silence_due, self._is_due = self._unread, [], False, False
        self.times_s, self._times_s = self._times_s, []
        if step:
            self._heard_s = time.monotonic()
            for _, delta in step:
                if delta.finish_reason is not None:
                    self._num_open -= 1
        elif self._error is not None:
            raise self._error
        return step

    def _wake(self) -> None:
        """Wake the reader through the loop's queue, so that it finds all deltas of the step at once."""
        if self._heard is not None:
            self._heard()
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class Feeds:
    """Maps request ids to the feeds of their readers. Owned by the loop.

    The engine ends a request some time after its reader has left, and the id may be in use again by then. So each id
    has a queue: what the engine reports belongs to the oldest request of that id until its end is reported.
    """

    def __init__(self) -> None:
        self._lines: dict[str, deque[Feed]] = {}  # by request id; oldest request first

    def add(self, feed: Feed) -> None:
        """Register a feed. Raises BadRequest, and registers nothing, when one of its ids has a reader."""
        for request_id in feed.index_of:
            if (line := self._lines.get(request_id)) and not line[-1].is_left:
                raise BadRequest("request_id", f"{request_id!r} is in use by a running request")
        for request_id in feed.index_of:
            self._lines.setdefault(request_id, deque()).append(feed)

    def put(self, items: Sequence[tuple[str, Delta | ServingError]]) -> None:
        """Hand out the deltas of one engine step."""
        now_s = time.perf_counter()
        for request_id, item in items:
            line = self._lines.get(request_id)
            if line is None:  # a bug of ours, which must not cost others their deltas
                log.error("request %s has ended, and the engine says more of it", request_id)
                continue
            if not line[0].is_left:
                line[0].put(request_id, item, now_s)
            if isinstance(item, ServingError) or item.finish_reason is not None:
                line.popleft()
                if not line:
                    del self._lines[request_id]

    def leave(self, feed: Feed) -> list[str]:
        """Deliver nothing more to this feed. Returns the ids of its requests that have not ended."""
        feed.is_left = True
        return [request_id for request_id in feed.index_of if feed in self._lines.get(request_id, ())]
