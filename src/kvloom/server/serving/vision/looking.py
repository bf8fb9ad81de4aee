"""Looking: fetches images where needed, and asks the engine for the prompt with their tokens."""

import asyncio
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from kvloom.contract.errors import BadRequest, GenerationFailed, Overloaded
from kvloom.contract.images import Image, Sight
from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from kvloom.server.serving.admission import Ticket
from kvloom.server.serving.service import GenerationService
from kvloom.server.serving.vision.hosts import ImageHosts
from kvloom.server.serving.vision.seen import Look, Seen
from kvloom.server.serving.vision.sources import MAX_ALL_BYTES, ImageSource

if TYPE_CHECKING:
    from kvloom.server.serving.vision.fetching import Fetcher

MAX_HELD_BYTES = 256 << 20  # bytes of images of all requests, until their answers end
_NOTHING = SamplingParams(temperature=0, max_tokens=0)


class _Room:
    """Counts bytes of images in this process. They are freed on whatever thread drops an image last."""

    def __init__(self) -> None:
        self._num_held, self._given_back = 0, deque[int]()

    def take(self, num_bytes: int) -> None:
        """Raises Overloaded."""
        while self._given_back:
            self._num_held -= self._given_back.popleft()
        if self._num_held and self._num_held + num_bytes > MAX_HELD_BYTES:
            raise Overloaded("requests with too many images are being answered; try again later")
        self._num_held += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self._given_back.append(num_bytes)


class Looking:
    """Owned by the loop."""

    def __init__(self, hosts: ImageHosts | None = None) -> None:
        self._hosts, self._room = hosts or ImageHosts(), _Room()
        self._fetcher: Fetcher | None = None

    async def see(self, look: Look, tenant: str) -> Seen:
        """The engine's view of a Look. When cancelled, everything stops. Raises ServingError; BadRequest names the
        image.
        """
        look.service.sleeper.check_awake()
        sources, num_bytes = await self._fetched(look.sources)
        sight = Sight(look.prompt_ids, tuple(Image(each.data, each.media_type, each.name) for each in sources))
        weakref.finalize(sight, self._room.give_back, num_bytes)
        try:
            found = await _looked(look.service, sight, tenant)
        except BadRequest as error:
            raise _named(error, sources) from None
        if found is None:
            raise GenerationFailed("the images could not be looked at")
        return Seen(found, sight)

    async def _fetched(self, sources: Sequence[ImageSource]) -> tuple[Sequence[ImageSource], int]:
        """Sources with their files, and the number of bytes reserved for these. Raises BadRequest, Overloaded."""
        num_taken = 0

        def take(num_bytes: int) -> None:
            nonlocal num_taken
            if num_taken + num_bytes > MAX_ALL_BYTES:
                raise BadRequest(sources[0].name, f"and the other images are larger than {MAX_ALL_BYTES} bytes")
            self._room.take(num_bytes)
            num_taken += num_bytes

        try:
            take(sum(len(source.data) for source in sources))
            return await self._with_files(sources, take), num_taken
        except BaseException:
            self._room.give_back(num_taken)
            raise

    async def _with_files(self, sources: Sequence[ImageSource], take: Callable[[int], None]) -> Sequence[ImageSource]:
        """Raises BadRequest, Overloaded."""
        wanted = [source for source in sources if source.url]
        if not wanted:
            return sources
        fetcher = self._fetcher_for(wanted[0])
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {id(source): group.create_task(fetcher.fetch(source, take)) for source in wanted}
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [tasks[id(source)].result() if source.url else source for source in sources]

    def _fetcher_for(self, source: ImageSource) -> "Fetcher":
        """The fetcher for a source. Raises BadRequest where nothing may be fetched."""
        if not self._hosts:
            raise BadRequest(
                source.name,
                "is not fetched: give the image itself as a data: URL; --allowed-image-host (allowedImageHosts) names "
                "servers to fetch from",
            )
        if self._fetcher is None:  # imported on demand: most servers fetch no images
            self._fetcher = import_module("kvloom.server.serving.vision.fetching").Fetcher(self._hosts)
        return self._fetcher


async def _looked(service: GenerationService, sight: Sight, tenant: str) -> tuple[int, ...] | None:
    """The prompt as the engine reads it; None when the request ends without one. Raises ServingError."""
    id, prompt_ids = f"look-{uuid.uuid4().hex}", sight.prompt_ids
    request = Request(id, prompt_ids, _NOTHING, tenant=tenant, sight=sight, is_look=True)
    found: tuple[int, ...] | None = None
    async with service.admission.slot(Ticket(num_tokens=len(prompt_ids))):
        with service.engine.open([request]) as feed:
            while (step := await feed.get()) is not None:
                for _, delta in step:
                    found = delta.prompt_ids or found
    return found


def _named(error: BadRequest, sources: Sequence[ImageSource]) -> BadRequest:
    """The engine's error, with the image that its message begins with as the field."""
    text = str(error)
    for source in sources:
        if text.startswith(f"{source.name}: "):
            return BadRequest(source.name, text[len(source.name) + 2 :])
    return error
