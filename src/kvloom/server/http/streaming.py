"""What every stream does, whoever makes its frames: errors before the first have a status, later ones a frame."""

import logging
from collections.abc import AsyncGenerator, Callable

from kvloom.contract.errors import ServingError
from kvloom.server.errors import BUG_TEXT
from kvloom.server.http.reply import Reply

log = logging.getLogger(__name__)


async def begun(frames: AsyncGenerator[bytes], media_type: str) -> Reply:
    """A reply whose first frame is there already. Raises what is raised before it."""
    try:
        return Reply(await anext(frames), frames, media_type=media_type)
    except BaseException:
        await frames.aclose()
        raise


def last_frame(problem: Exception, has_begun: bool, error: Callable[[ServingError], bytes]) -> bytes:
    """The frame that ends a stream by `problem`, as `error` writes it. Raises `problem` while there is no frame yet."""
    if not has_begun:
        raise problem
    if isinstance(problem, ServingError):
        return error(problem)
    log.error("a stream failed", exc_info=problem)  # our mistake; the client is told all the same
    return error(ServingError(BUG_TEXT))
