"""Parsing on the event loop: code that may take long calls `may_take_long`, and the body is parsed in another
process.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_is_inline = ContextVar("is_inline", default=False)


class NotInline(Exception):
    """The body must be parsed in another process, from its beginning."""


@contextmanager
def inline() -> Iterator[None]:
    """A context in which nothing may take long."""
    token = _is_inline.set(True)
    try:
        yield
    finally:
        _is_inline.reset(token)


def may_take_long() -> None:
    """Called before work that may take long. Raises NotInline."""
    if _is_inline.get():
        raise NotInline
