"""Images during parsing: a prompt with images is only known after the engine has seen them.

Parsing cannot wait. It returns a Look instead of a job; the engine looks, and the body is parsed again with the result.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from kvloom.contract.images import Sight
from kvloom.server.serving.service import GenerationService
from kvloom.server.serving.vision.sources import ImageSource


@dataclass(frozen=True, slots=True)
class Look:
    """The images and prompt that the engine of `service` must look at. `prompt_ids`: as the chat template wrote
    them.
    """

    service: GenerationService
    prompt_ids: tuple[int, ...]
    sources: tuple[ImageSource, ...]


@dataclass(frozen=True, slots=True)
class Seen:
    """`prompt_ids`: as the model reads them, with the tokens of the images."""

    prompt_ids: tuple[int, ...]
    sight: Sight


class NotSeen(Exception):
    """The engine must look first; then the body is parsed from its beginning."""

    def __init__(self, look: Look) -> None:
        super().__init__()
        self.look = look


_seen: ContextVar[Seen | None] = ContextVar("seen", default=None)


@contextmanager
def seeing(seen: Seen | None) -> Iterator[None]:
    """A context in which one body is parsed with what was seen."""
    token = _seen.set(seen)
    try:
        yield
    finally:
        _seen.reset(token)


def seen_of(look: Look) -> Seen:
    """The result for a look. Raises NotSeen while there is none."""
    seen = _seen.get()
    if seen is None:
        raise NotSeen(look)
    return seen
