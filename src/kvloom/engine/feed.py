"""Feed: the deltas of one or more requests on their way from the engine's thread to one reader on the loop."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from kvloom.contract.errors import BadRequest, GenerationFailed, ServingError
from kvloom.contract.request import Delta, FinishReason, Request

log = logging.getLogger(__name__)

Step = list[tuple[int, Delta]]  # what one engine step brought a feed: (index of the request, its delta)


class Feed:
    """What the requests of one reader bring, a list for each engine step. Owned by the loop.

    Used as a context manager: leaving it is the cancel, the blocks of what still runs are free within one step.
    """

    def __init__(self, requests: Sequence[Request], drop: Callable[["Feed"], None]) -> None:
        self.index_of = {request.id: index for index, request in enumerate(requests)}
        self._drop = drop
        self._steps: asyncio.Queue[Step | ServingError] = asyncio.Queue()
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
                self._heard_s, left_s = time.monotonic(), every_s
                if self._steps.empty():
                    self._steps.put_nowait([])
            self._ticking = asyncio.get_running_loop().call_later(left_s, look)

        look()

    def put(self, items: Sequence[tuple[str, Delta | ServingError]]) -> None:
        """The (request id, delta or error) of one step. An error ends the feed for all of its requests."""
        step: Step = []
        for request_id, item in items:
            if isinstance(item, Delta) and item.finish_reason is FinishReason.ERROR:
                error = item.error or "the model failed"
                item = BadRequest("", error) if item.is_callers else GenerationFailed(error)
            if isinstance(item, ServingError):
                self._put(step)
                self._steps.put_nowait(item)
                return
            step.append((self.index_of[request_id], item))
        self._put(step)

    async def get(self) -> Step | None:
        """The next step's deltas; None when every request has ended.

        Raises BadRequest when a request can never run, GenerationFailed when the model failed under it.
        """
        if not self._num_open:
            return None
        step = await self._steps.get()
        if isinstance(step, ServingError):
            raise step
        self._num_open -= sum(delta.finish_reason is not None for _, delta in step)
        return step

    def _put(self, step: Step) -> None:
        self._heard_s = time.monotonic()
        if step:
            self._steps.put_nowait(step)


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
        """What one engine step brought, a list for each feed."""
        steps: dict[Feed, list[tuple[str, Delta | ServingError]]] = {}
        for request_id, item in items:
            line = self._lines.get(request_id)
            if line is None:  # our mistake, which is not to cost the others of this step theirs
                log.error("request %s has ended, and the engine says more of it", request_id)
                continue
            if not line[0].is_left:
                steps.setdefault(line[0], []).append((request_id, item))
            if isinstance(item, ServingError) or item.finish_reason is not None:
                line.popleft()
                if not line:
                    del self._lines[request_id]
        for feed, step in steps.items():
            feed.put(step)

    def leave(self, feed: Feed) -> list[str]:
        """Nothing more reaches the feed. Returns the ids of its requests whose end was not said."""
        feed.is_left = True
        return [request_id for request_id in feed.index_of if feed in self._lines.get(request_id, ())]
