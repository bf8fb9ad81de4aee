"""Messages to the engine's thread, which handles them between two steps, in order, and a bounded number at a time."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from kvloom.contract.request import Request
from kvloom.engine.adapters import Adapter

MAX_REQUESTS = 32  # new requests handled between two steps; other messages are not limited
MAX_WEIGHT = 4096  # and the sum of their weights: a few milliseconds of hashing and checking


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


def weight(request: Request) -> int:
    """What accepting a request costs, in prompt tokens."""
    return len(request.prompt_ids) + len(request.params.logit_bias)


class Intake:
    """Messages in order, so bounded that a burst of requests delays no step.

    Requests may wait for several steps; one dropped meanwhile never reaches the engine.
    """

    def __init__(self) -> None:
        self._waiting: dict[str | int, Message] = {}  # requests by id, other messages by a number
        self._num_put = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, message: Message) -> bool:
        """Queue a message. True when nothing is left to do: it dropped a request that was still queued here."""
        if isinstance(message, Drop) and message.request_id in self._waiting:
            del self._waiting[message.request_id]
            return True
        self._num_put += 1
        self._waiting[message.request.id if isinstance(message, Add) else self._num_put] = message
        return False

    def take(self) -> Iterator[Message]:
        """The messages to handle before the next step: at least one if there is any."""
        num_requests = total = 0
        while self._waiting:
            key, message = next(iter(self._waiting.items()))
            if isinstance(message, Add):
                total += weight(message.request)
                num_requests += 1
                if num_requests > 1 and (num_requests > MAX_REQUESTS or total > MAX_WEIGHT):
                    return
            del self._waiting[key]
            yield message

    def take_all(self) -> list[Message]:
        messages = list(self._waiting.values())
        self._waiting.clear()
        return messages
