"""FleetEngine: looks like an engine to the server, and is the whole fleet. Knows Ray only as `Call`."""

import asyncio
import itertools
import logging
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass

from kvloom.contract.capabilities import check_capable
from kvloom.contract.errors import BadRequest, GenerationFailed, ServingError, Unavailable
from kvloom.contract.messages import AdapterInfo, RankInfo
from kvloom.contract.request import Delta, FinishReason, Request, check_request
from kvloom.engine.adapters import Adapter
from kvloom.engine.feed import Feed
from kvloom.engine.schedule.blocks import LastChain, Scope, adapter_salt
from kvloom.engine.stats import Stats
from kvloom.fleet.args import FleetArgs
from kvloom.fleet.figures import Totals, replica_figures
from kvloom.fleet.journey import MAX_MOVES, Journey, with_seed
from kvloom.fleet.lost import Call, ReplicaLost
from kvloom.fleet.mail.mailroom import Mailroom, Visit
from kvloom.fleet.routing.board import Board, View
from kvloom.fleet.routing.knowledge import packed
from kvloom.fleet.wire import About, Asked, Brought, Ended, Hello, Hint, Item, decode_item, encode, error_of
from kvloom.server.serving.engine import ReplicaFigures

log = logging.getLogger(__name__)

_NOBODY = "no replica answers; try again soon"
_CUT = "its stream ended before the answer did"
_OTHER_FORM = "it holds the model in another form than the one that began the answer"
_OTHER = "the replicas were deployed anew with another model; start this server again"
_STOPPING = "the server is stopping"
_WALKED = f"the request was lost with {MAX_MOVES + 1} replicas, one after the other"


class _Nobody(Unavailable):
    """No replica accepted the request in time, so there is none to continue on."""


@dataclass(frozen=True, slots=True)
class Manners:
    """How the fleet answers. `patience_s`: how long a request waits for a replica that accepts it."""

    patience_s: float = 120.0
    may_be_empty: bool = False  # no replica runs while there are no requests


def manners_of(args: FleetArgs) -> Manners:
    return Manners(args.patience_s, args.may_be_empty)


@dataclass(frozen=True, slots=True)
class Way:
    """A deployment's replicas, and what the router publishes about them. `post` makes a replica fill a mailbox."""

    call: Call
    board: Board
    post: Call | None = None


@dataclass(frozen=True, slots=True)
class Ways:
    """The replicas that do everything (or all but long prompts), and those that prefill long prompts.

    A prompt is long from `threshold` tokens on.
    """

    whole: Way
    prefill: Way | None = None
    threshold: int = 0

    @property
    def views(self) -> list[View]:
        return [*(self.prefill.board.views if self.prefill else ()), *self.whole.board.views]


class FleetEngine:
    """An EngineLike. Owned by the ingress's loop; `about` describes its replicas."""

    def __init__(self, about: About, ways: Ways, manners: Manners | None = None) -> None:
        self._about, self._ways = about, ways
        self._manners = manners or Manners()
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by request id
        self._feeds: dict[str, Feed] = {}
        self._mailroom = None if ways.whole.post is None else Mailroom(ways.whole.post)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._adapters = itertools.count(1)  # adapters; replicas number them in the same order
        self._is_closing = False
        self._totals = Totals()
        self._last = LastChain()
        self.num_moves, self.num_lost = 0, 0  # requests that continued on another replica, and requests that could not

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Replicas are already running; feeds are read on `loop`."""
        self._loop = loop

    @property
    def max_seq_len(self) -> int:
        return self._about.max_seq_len

    @property
    def info(self) -> RankInfo:
        """RankInfo of one replica; all are alike."""
        return self._about.info

    @property
    def is_ready(self) -> bool:
        has_replica = any(view.stats.get("is_ready", True) for view in self._ways.whole.board.views)
        return not self._is_closing and (has_replica or self._manners.may_be_empty)

    def check_ready(self) -> None:
        """Raises Unavailable."""
        if not self.is_ready:
            raise Unavailable(_STOPPING if self._is_closing else _NOBODY)

    def stats(self) -> Stats:
        """The sum of the replicas' last reports, up to two seconds old; counters keep those of lost ones."""
        return self._totals.sum(self._ways.views)

    def replicas(self) -> Sequence[ReplicaFigures]:
        """The report of each, by name."""
        return [replica_figures(view) for view in self._ways.views]

    def open(self, requests: Sequence[Request]) -> Feed:
        """Raises Unavailable, BadRequest."""
        if self._is_closing:
            raise Unavailable(_STOPPING)
        for request in requests:
            if request.id in self._tasks:
                raise BadRequest("request_id", f"{request.id!r} is in use by a running request")
            check_request(request, self.max_seq_len, self.info.vocab_size)
            check_capable(self.info.lacks, request, request.adapter)
        feed = Feed(requests, self._drop)
        for request in requests:
            journey = Journey(with_seed(request, lambda: secrets.randbits(63)))
            self._feeds[request.id] = feed
            self._tasks[request.id] = asyncio.get_running_loop().create_task(self._run(journey, feed))
        return feed

    async def stream(self, request: Request) -> AsyncGenerator[Delta]:
        with self.open([request]) as feed:
            while (step := await feed.get()) is not None:
                for _, delta in step:
                    yield delta

    def abort(self, request_id: str) -> None:
        """End a request with what it has. Unknown ids are ignored."""
        feed = self._feeds.get(request_id)
        if feed is not None:
            self._end(request_id)
            feed.put(request_id, Delta(request_id, finish_reason=FinishReason.ABORT))

    def close(self) -> None:
        """End running requests with an error. May be called from any thread."""
        self._is_closing = True
        if self._loop is None or self._loop is _running_loop():
            self._end_all()
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end_all)

    def _end_all(self) -> None:
        for request_id, feed in list(self._feeds.items()):
            self._end(request_id)
            feed.put(request_id, Unavailable(_STOPPING))
        if self._mailroom is not None:
            self._mailroom.close()

    def preload_adapter(self, path: str) -> Adapter:
        """The next adapter that each replica has loaded, in the order of the configuration."""
        number = next(self._adapters)
        return Adapter(number, path, AdapterInfo(self._about.adapters[number - 1], 0, 0))

    async def load_adapter(self, path: str) -> Adapter:
        raise BadRequest("lora_path", "a fleet loads its adapters at the start; name it under loraModules and deploy")

    def unload_adapter(self, adapter: int) -> None:
        raise BadRequest("lora_name", "a fleet keeps its adapters; take it out of loraModules and deploy")

    async def reset_prefix_cache(self, preempts: bool) -> None:
        raise BadRequest("", "a fleet's prefix caches are emptied by a deployment")

    async def sleep(self) -> None:
        raise BadRequest("", "a fleet does not sleep; autoscaling with minReplicas 0 gives its memory back")

    async def wake(self, wants_same_weights: bool) -> None:
        raise BadRequest("", "a fleet does not sleep, so it does not wake")

    # -- a request

    def _drop(self, feed: Feed) -> None:
        for request_id in feed.index_of:
            if self._feeds.get(request_id) is feed:
                self._end(request_id)

    def _end(self, request_id: str) -> None:
        self._feeds.pop(request_id, None)
        task = self._tasks.pop(request_id, None)
        if task is not None:
            task.cancel()

    async def _run(self, journey: Journey, feed: Feed) -> None:
        """Run a request until its end is delivered, once."""
        id = journey.request.id
        try:
            await self._travel(journey, feed)
        except ServingError as error:
            feed.put(id, error)
        except Exception as error:  # a bug of ours, which must not leave the caller waiting
            log.exception("request %s failed", id)
            feed.put(id, GenerationFailed(str(error)))
        finally:
            if self._feeds.get(id) is feed:
                self._feeds.pop(id)
                self._tasks.pop(id, None)

    async def _travel(self, journey: Journey, feed: Feed) -> None:
        """From one replica to the next until one has finished the request. Raises ServingError."""
        way = self._ways.prefill if self._is_long(journey.request) else None
        while True:
            try:
                if await self._visit(journey, feed, way or self._ways.whole):
                    return
                way = None
            except _Nobody:
                raise
            except (ReplicaLost, Unavailable) as problem:
                log.info("%s was lost with replica %s: %s", journey.request.id, journey.replica or "?", problem)
                if not journey.lose():
                    self.num_lost += 1
                    if isinstance(problem, Unavailable) and not journey.told:
                        raise
                    raise GenerationFailed(_WALKED) from None
                self.num_moves += 1
                way = None

    def _is_long(self, request: Request) -> bool:
        """Whether its prompt is computed on another replica; never when data of each prompt token is asked for."""
        is_plain = request.may_reuse and not request.pooling and request.params.max_tokens != 0
        return self._ways.prefill is not None and is_plain and len(request.prompt_ids) >= self._ways.threshold

    async def _visit(self, journey: Journey, feed: Feed, way: Way) -> bool:
        """Run on one replica. Returns whether the request ended there; a prefill replica ends its part with the first
        token.

        Raises ReplicaLost, ServingError.
        """
        visit, mailroom = Visit(journey, feed), self._mailroom if way is self._ways.whole else None
        key = 0 if mailroom is None else mailroom.enter(visit)
        request = journey.next_request()
        asked = Asked(request, "" if mailroom is None else mailroom.name, key)
        try:
            async with aclosing(way.call(encode(asked), encode(self._hint(request, journey)))) as items:
                data: bytes | None = await self._first(items)
                while data is not None:
                    await self._take(decode_item(data), visit, way.board, mailroom)
                    data = await visit.beside(_next(items))
        except ReplicaLost:
            if not visit.is_over:
                raise
        finally:
            if mailroom is not None:
                mailroom.leave(key)
        if not visit.is_over and (way is self._ways.whole or not journey.told):
            raise ReplicaLost(_CUT)
        return visit.is_over

    async def _first(self, items: AsyncGenerator[bytes]) -> bytes:
        """A replica's answer to a new request. Raises ReplicaLost, Unavailable."""
        try:
            first = await asyncio.wait_for(_next(items), self._manners.patience_s)
        except TimeoutError:
            raise _Nobody(_NOBODY) from None
        if first is None:
            raise ReplicaLost(_CUT)
        return first

    async def _take(self, item: Item, visit: Visit, board: Board, mailroom: Mailroom | None) -> None:
        """Handle one item of a request's own stream. Raises ReplicaLost, ServingError."""
        if isinstance(item, Hello):
            if not visit.journey.arrived(item.replica, item.layout):
                raise ReplicaLost(_OTHER_FORM)
            if item.serves != self._about.serves:
                raise Unavailable(_OTHER)
            if mailroom is not None:
                mailroom.open(item.replica)
        elif isinstance(item, Brought):
            if not item.at:
                board.begun.put(visit.journey.request.id)
            visit.take(item.at, item.deltas)
        elif isinstance(item, Ended):
            await visit.until_told(item.num_deltas)
        else:
            raise error_of(item)

    def _hint(self, request: Request, journey: Journey) -> Hint:
        tokens = (*request.prompt_ids, *request.answer)
        hashes: list[bytes] = []
        if request.may_reuse:
            digest = self._about.adapters[request.adapter - 1] if request.adapter else ""
            salt = adapter_salt(request.cache_salt, digest)
            told = tokens if request.sight is None else request.sight.told_apart(tokens)
            hashes = self._last.of(tuple(told), self.info.block_size, Scope(salt))
        return Hint(request.id, len(tokens), packed(hashes), journey.lost, journey.required_layout)


async def _next(items: AsyncGenerator[bytes]) -> bytes | None:
    """The next item; None at the end."""
    async for item in items:
        return item
    return None


def _running_loop() -> asyncio.AbstractEventLoop | None:
    """Of this thread."""
    with suppress(RuntimeError):
        return asyncio.get_running_loop()
    return None
