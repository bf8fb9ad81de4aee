"""Intake: bounds what the engine's thread handles between two steps, so that a burst of requests delays no step."""

from collections.abc import Iterator

from kvloom.contract.request import Request
from kvloom.engine.inbox import Add, Drop, Message

MAX_REQUESTS = 32  # new requests handled between two steps; other messages are not limited
MAX_WEIGHT = 4096  # and the sum of their weights: a few milliseconds of hashing and checking


def weight(request: Request) -> int:
    """What accepting a request costs, in prompt tokens."""
    return len(request.prompt_ids) + len(request.params.logit_bias)


class Intake:
    """Messages in order. Requests may wait for several steps; one dropped meanwhile never reaches the engine."""

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
