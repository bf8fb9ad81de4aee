"""What others ask of the engine's thread: messages that it takes between two steps, in their order."""

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
    """Nobody reads its answer any more."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Unload:
    """No new request names this adapter."""

    adapter: int


@dataclass(frozen=True, slots=True)
class Load:
    """A LoRA adapter from a folder."""

    path: str
    answer: asyncio.Future[Adapter]  # every `answer` is owned by the loop


@dataclass(frozen=True, slots=True)
class Reset:
    """The prefix cache; `preempts`: what runs is computed again, too."""

    preempts: bool
    answer: asyncio.Future[None]


@dataclass(frozen=True, slots=True)
class Sleep:
    """End the ranks as soon as nothing runs."""

    answer: asyncio.Future[None]


@dataclass(frozen=True, slots=True)
class Wake:
    """`wants_same_weights`: refuse files that have changed since they were loaded."""

    wants_same_weights: bool
    answer: asyncio.Future[None]


Asked = Load | Reset | Sleep | Wake  # each of them is answered once, whatever happens
Message = Add | Drop | Unload | Asked
