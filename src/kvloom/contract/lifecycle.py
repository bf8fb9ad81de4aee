"""What every child that holds a model says about itself (MessagePack arrays). Kinds differ in `Info`, and in their
first order.
"""

from typing import Generic, TypeVar

import msgspec

Info = TypeVar("Info")


class Loading(msgspec.Struct, array_like=True, tag="loading"):
    """Progress of loading the weights."""

    done_bytes: int
    total_bytes: int


class Ready(msgspec.Struct, Generic[Info], array_like=True, tag="ready"):
    """The model is loaded; orders may be sent."""

    info: Info


class Failed(msgspec.Struct, array_like=True, tag="failed"):
    """The model cannot be loaded, or a step raised; the child ends after this message."""

    error: str


class Ping(msgspec.Struct, array_like=True, tag="ping"):
    """Asks for a sign of life; the child answers between two steps."""


class Pong(msgspec.Struct, array_like=True, tag="pong"):
    """A sign of life, asked for or not."""
