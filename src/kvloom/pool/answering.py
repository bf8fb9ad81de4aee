"""Which method of a session's parts answers which request."""

from collections.abc import Callable
from typing import Any, TypeVar

from ems.wire import messages as m

Answer = Callable[[Any, float], m.Message | None]  # of a request, by its deadline (time.monotonic)
Method = TypeVar("Method", bound=Callable[..., Any])


def answers(request: type[m.Message]) -> Callable[[Method], Method]:
    """Marks the method that answers such requests, given one and its deadline."""

    def mark(method: Method) -> Method:
        method.answers = request  # type: ignore[attr-defined]
        return method

    return mark


def answers_of(*parts: object) -> dict[type[m.Message], Answer]:
    """The marked methods of these objects."""
    return {
        method.answers: getattr(part, name)
        for part in parts
        for name, method in vars(type(part)).items()
        if hasattr(method, "answers")
    }
