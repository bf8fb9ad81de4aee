"""What all streams share: errors before the first frame get a status, later ones a frame."""

import logging
from collections.abc import AsyncGenerator, Callable

from kvloom.contract.errors import ServingError
from kvloom.server.errors import BUG_TEXT
from kvloom.server.http.reply import Reply

log = logging.getLogger(__name__)


async def begun(frames: AsyncGenerator[bytes], media_type: str) -> Reply:
    """A reply whose first frame is ready. Raises the error that precedes it."""
    try:
        return Reply(await anext(frames), frames, media_type=media_type)
    except BaseException:
        await frames.aclose()
        raise


def last_frame(problem: Exception, has_begun: bool, error: Callable[[ServingError], bytes]) -> bytes:
    """The last frame of a stream that ends by `problem`, written by `error`. Raises `problem` if no frame was sent."""
    if not has_begun:
        raise problem
    if isinstance(problem, ServingError):
        return error(problem)
    log.error("a stream failed", exc_info=problem)  # a bug of ours; the client is told nevertheless
    return error(ServingError(BUG_TEXT))
