"""What parsing does with images: a prompt that has some is known when the engine has looked at them.

Parsing waits for nothing. It gives a Look instead of a job, the engine looks, and the body is parsed once more with
what was seen.
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
    """What the engine of `service` is to look at. `prompt_ids`: as the chat template wrote them."""

    service: GenerationService
    prompt_ids: tuple[int, ...]
    sources: tuple[ImageSource, ...]


@dataclass(frozen=True, slots=True)
class Seen:
    """`prompt_ids`: as the model reads them, with the tokens of the images."""

    prompt_ids: tuple[int, ...]
    sight: Sight


class NotSeen(Exception):
    """The engine is to look first; then the body is parsed from its beginning."""

    def __init__(self, look: Look) -> None:
        super().__init__()
        self.look = look


_seen: ContextVar[Seen | None] = ContextVar("seen", default=None)


@contextmanager
def seeing(seen: Seen | None) -> Iterator[None]:
    """Inside of it one body is parsed."""
    token = _seen.set(seen)
    try:
        yield
    finally:
        _seen.reset(token)


def seen_of(look: Look) -> Seen:
    """Raises NotSeen."""
    seen = _seen.get()
    if seen is None:
        raise NotSeen(look)
    return seen
