"""Intake: what the engine's thread takes up between two steps, so that no step waits long for what has come."""

from collections.abc import Iterator

from kvloom.contract.request import Request
from kvloom.engine.inbox import Add, Drop, Message

MAX_REQUESTS = 32  # taken up between two steps
MAX_WEIGHT = 4096  # of them, as `weight` has it: a few milliseconds of hashing and checking


def weight(request: Request) -> int:
    """What it costs to take a request up, in prompt tokens."""
    return len(request.prompt_ids) + len(request.params.logit_bias)


class Intake:
    """Messages in their order. Requests are held back until their turn; a dropped one is forgotten at once."""

    def __init__(self) -> None:
        self._waiting: dict[str | int, Message] = {}  # requests by id, others by a number
        self._num_put = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, message: Message) -> bool:
        """Whether that was all: it drops a request which nobody has taken up, and which nobody will."""
        if isinstance(message, Drop) and message.request_id in self._waiting:
            del self._waiting[message.request_id]
            return True
        self._num_put += 1
        self._waiting[message.request.id if isinstance(message, Add) else self._num_put] = message
        return False

    def take(self) -> Iterator[Message]:
        """What is taken up before the next step: at least one message when there is any."""
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
