"""What messages are: their base classes, and all of them by number. Pure."""

from typing import ClassVar, Generic, TypeVar, get_args

MESSAGES: dict[int, type["Message"]] = {}
"""By their number."""


class Message:
    """Base of all messages: dataclasses of fields that `packing` knows, new ones last and with a default.

    A `__post_init__` that raises ValueError makes the frame malformed. IS_NATIVE: the agent answers it in C++ where it
    need not ask the node; `make golden` writes its struct, and that of its answer, to `ems/native/messages.hpp`.
    """

    OP: ClassVar[int]
    IS_NATIVE: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "OP" in vars(cls) and MESSAGES.setdefault(cls.OP, cls) is not cls:
            raise TypeError(f"{cls.__name__} has the number of {MESSAGES[cls.OP].__name__}")


A = TypeVar("A", bound=Message)


class Request(Message, Generic[A]):
    """A message with an answer of one kind; a Failure comes instead if it cannot be served."""

    ANSWER: type[A]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        (cls.ANSWER,) = get_args(cls.__orig_bases__[0])  # type: ignore[attr-defined]
