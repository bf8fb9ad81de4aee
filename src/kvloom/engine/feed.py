"""Feed: the deltas of one or more requests on their way from the engine's thread to one reader on the loop."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from kvloom.contract.errors import BadRequest, GenerationFailed, ServingError
from kvloom.contract.request import Delta, FinishReason, Request

log = logging.getLogger(__name__)

Step = list[tuple[int, Delta]]  # what has come since the feed was read before: (index of the request, its delta)


class Feed:
    """What the requests of one reader bring: what came of one engine step together, or of several when it was slow.

    Owned by the loop. Used as a context manager: leaving it is the cancel, blocks of what still runs are free within
    one step.
    """

    def __init__(self, requests: Sequence[Request], drop: Callable[["Feed"], None]) -> None:
        self.index_of = {request.id: index for index, request in enumerate(requests)}
        self._drop = drop
        self._unread: Step = []
        self._error: ServingError | None = None  # behind what is unread
        self._is_silence_due = False
        self._reader: asyncio.Future[None] | None = None
        self._heard: Callable[[], None] | None = None
        self._num_open = len(requests)
        self._heard_s = 0.0
        self._ticking: asyncio.TimerHandle | None = None
        self.is_left = False  # nobody reads it any more

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *error: object) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
        self._drop(self)

    def tell_silence(self, every_s: float) -> None:
        """From now on `get` brings an empty step whenever nothing has come for so long."""
        self._heard_s = time.monotonic()

        def look() -> None:
            left_s = self._heard_s + every_s - time.monotonic()
            if left_s <= 0:
                self._heard_s, left_s, self._is_silence_due = time.monotonic(), every_s, True
                self._wake()
            self._ticking = asyncio.get_running_loop().call_later(left_s, look)

        look()

    def put(self, request_id: str, item: Delta | ServingError) -> None:
        """The next of a request. An error ends the feed for all of its requests."""
        if isinstance(item, ServingError):
            self._error = self._error or item
        elif item.finish_reason is FinishReason.ERROR:
            error = item.error or "the model failed"
            self._error = self._error or (BadRequest("", error) if item.is_callers else GenerationFailed(error))
        elif self._error is None:
            self._unread.append((self.index_of[request_id], item))
        self._wake()

    async def get(self) -> Step | None:
        """All that has come since the call before, waited for when nothing has; None when every request has ended.

        Raises BadRequest when a request can never run, GenerationFailed when the model failed under it.
        """
        while self._num_open and not (self._unread or self._error or self._is_silence_due):
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self.take()

    def follow(self, heard: Callable[[], None] | None) -> None:
        """Instead of waiting in `get`: `heard` is called whenever something has come, now if it has; `take` has it."""
        self._heard = heard
        if self._unread or self._error:
            self._wake()

    def take(self) -> Step | None:
        """As `get`, but an empty step when nothing has come."""
        if not self._num_open:
            return None
        step, self._unread, self._is_silence_due = self._unread, [], False
        if step:
            self._heard_s = time.monotonic()
            for _, delta in step:
                if delta.finish_reason is not None:
                    self._num_open -= 1
        elif self._error is not None:
            raise self._error
        return step

    def _wake(self) -> None:
        """The reader goes on when the loop has done what it is at, and so finds all of a step."""
        if self._heard is not None:
            self._heard()
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class Feeds:
    """Who reads which request. Owned by the loop.

    The engine ends a request some time after its reader has left. An id that is used again meanwhile stands in line:
    what the engine says of it belongs to the oldest request of that name until that one's end was said.
    """

    def __init__(self) -> None:
        self._lines: dict[str, deque[Feed]] = {}  # by request id, oldest first

    def add(self, feed: Feed) -> None:
        """Raises BadRequest, and adds nothing, when somebody reads one of its ids."""
        for request_id in feed.index_of:
            if (line := self._lines.get(request_id)) and not line[-1].is_left:
                raise BadRequest("request_id", f"{request_id!r} is in use by a running request")
        for request_id in feed.index_of:
            self._lines.setdefault(request_id, deque()).append(feed)

    def put(self, items: Sequence[tuple[str, Delta | ServingError]]) -> None:
        """What one engine step brought."""
        for request_id, item in items:
            line = self._lines.get(request_id)
            if line is None:  # our mistake, which is not to cost the others of this step theirs
                log.error("request %s has ended, and the engine says more of it", request_id)
                continue
            if not line[0].is_left:
                line[0].put(request_id, item)
            if isinstance(item, ServingError) or item.finish_reason is not None:
                line.popleft()
                if not line:
                    del self._lines[request_id]

    def leave(self, feed: Feed) -> list[str]:
        """Nothing more reaches the feed. Returns the ids of its requests whose end was not said."""
        feed.is_left = True
        return [request_id for request_id in feed.index_of if feed in self._lines.get(request_id, ())]
