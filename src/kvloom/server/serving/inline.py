"""Parsing on the event loop: what may take long there says so, and is done in another process instead."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_is_inline = ContextVar("is_inline", default=False)


class NotInline(Exception):
    """The body is to be parsed elsewhere, from its beginning."""


@contextmanager
def inline() -> Iterator[None]:
    """Inside of it nothing takes long."""
    token = _is_inline.set(True)
    try:
        yield
    finally:
        _is_inline.reset(token)


def may_take_long() -> None:
    """Raises NotInline."""
    if _is_inline.get():
        raise NotInline
