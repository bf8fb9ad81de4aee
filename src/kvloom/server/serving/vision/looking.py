"""Looking: images fetched where that is needed, and what the engine makes of a prompt with them."""

import asyncio
import uuid
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from kvloom.contract.errors import BadRequest, GenerationFailed
from kvloom.contract.images import Image, Sight
from kvloom.contract.request import Request, SamplingParams
from kvloom.server.serving.admission import Ticket
from kvloom.server.serving.vision.hosts import ImageHosts
from kvloom.server.serving.vision.seen import Look, Seen
from kvloom.server.serving.vision.sources import MAX_ALL_BYTES, ImageSource

if TYPE_CHECKING:
    from kvloom.server.serving.vision.fetching import Fetcher

_NOTHING = SamplingParams(temperature=0, max_tokens=0)


class Looking:
    """Owned by the loop."""

    def __init__(self, hosts: ImageHosts | None = None) -> None:
        self._hosts = hosts or ImageHosts()
        self._fetcher: Fetcher | None = None

    async def see(self, look: Look, tenant: str) -> Seen:
        """Cancelled, nothing of it goes on. Raises ServingError; BadRequest names the image."""
        service = look.service
        service.sleeper.check_awake()
        sources = await self._fetched(look.sources)
        sight = Sight(look.prompt_ids, tuple(Image(each.data, each.media_type, each.name) for each in sources))
        request = Request(
            f"look-{uuid.uuid4().hex}", look.prompt_ids, _NOTHING, tenant=tenant, sight=sight, is_look=True
        )
        found: tuple[int, ...] | None = None
        async with service.admission.slot(Ticket(num_tokens=len(look.prompt_ids))):
            with service.engine.open([request]) as feed:
                try:
                    while (step := await feed.get()) is not None:
                        for _, delta in step:
                            found = delta.prompt_ids or found
                except BadRequest as error:
                    raise _named(error, sources) from None
        if found is None:
            raise GenerationFailed("the images could not be looked at")
        return Seen(found, sight)

    async def _fetched(self, sources: Sequence[ImageSource]) -> Sequence[ImageSource]:
        """Raises BadRequest."""
        left = MAX_ALL_BYTES - sum(len(source.data) for source in sources)

        def check_total(num_bytes: int) -> None:
            nonlocal left
            left -= num_bytes
            if left < 0:
                raise BadRequest(sources[0].name, f"and the other images are larger than {MAX_ALL_BYTES} bytes")

        check_total(0)
        wanted = [source for source in sources if source.url]
        if not wanted:
            return sources
        fetcher = self._fetcher_for(wanted[0])
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {id(source): group.create_task(fetcher.fetch(source, check_total)) for source in wanted}
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [tasks[id(source)].result() if source.url else source for source in sources]

    def _fetcher_for(self, source: ImageSource) -> "Fetcher":
        """Raises BadRequest where nothing is fetched."""
        if not self._hosts:
            raise BadRequest(
                source.name,
                "is not fetched: give the image itself as a data: URL; --allowed-image-host (allowedImageHosts) names "
                "servers to fetch from",
            )
        if self._fetcher is None:  # who fetches nothing does not wait for the import of what it takes
            self._fetcher = import_module("kvloom.server.serving.vision.fetching").Fetcher(self._hosts)
        return self._fetcher


def _named(error: BadRequest, sources: Sequence[ImageSource]) -> BadRequest:
    """The engine's error with the image that it begins with as its field."""
    text = str(error)
    for source in sources:
        if text.startswith(f"{source.name}: "):
            return BadRequest(source.name, text[len(source.name) + 2 :])
    return error
