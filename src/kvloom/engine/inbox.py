"""Messages to the engine's thread, which handles them between two steps, in order."""

import asyncio
from dataclasses import dataclass

from kvloom.contract.request import Request
from kvloom.engine.adapters import Adapter


@dataclass(frozen=True, slots=True)
class Add:
    """A request to run."""

    request: Request


@dataclass(frozen=True, slots=True)
class Drop:
    """The reader has left: end the request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Unload:
    """Refuse the adapter to new requests; drop it when its last one has ended."""

    adapter: int


@dataclass(frozen=True, slots=True)
class Load:
    """Load a LoRA adapter from a folder."""

    path: str
    answer: asyncio.Future[Adapter]  # all `answer` futures belong to the loop


@dataclass(frozen=True, slots=True)
class Reset:
    """Reset the prefix cache; with `preempts` running requests are computed again too."""

    preempts: bool
    answer: asyncio.Future[None]


@dataclass(frozen=True, slots=True)
class Sleep:
    """End the ranks as soon as nothing runs."""

    answer: asyncio.Future[None]


@dataclass(frozen=True, slots=True)
class Wake:
    """Load the model again. `wants_same_weights`: refuse files that have changed since they were loaded."""

    wants_same_weights: bool
    answer: asyncio.Future[None]


Asked = Load | Reset | Sleep | Wake  # messages with a future, each answered exactly once
Message = Add | Drop | Unload | Asked
