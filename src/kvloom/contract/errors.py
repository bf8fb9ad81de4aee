"""What a caller of the engine may see go wrong.

UserError             a command prints it, one line, and ends with 1
ServingError
 +- BadRequest       a value of the request is out of range or of the wrong form
 +- NotFound         no such model or request
 +- Overloaded       all admission slots are taken; try again later
 +- Unavailable      starting, restarting or stopping; try again soon
 +- GenerationFailed the model failed under a request that had been accepted
 +- TimedOut         a request took longer than the server gives one
 +- ModelError       a model cannot be loaded (file, format, architecture)
     +- OutOfMemory  ... because weights and KV cache do not fit
"""

from typing import Any


class UserError(Exception):
    """Something that a person can put right; one sentence says how. Never holds a secret."""


class ServingError(UserError):
    """Base of what a caller may see. `kind` picks the HTTP status; the message is for people."""

    kind = "internal"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[ServingError], args: tuple[Any, ...], fields: dict[str, Any]) -> ServingError:
    """Rebuilds a pickled error without its constructor."""
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(fields)
    return error


class BadRequest(ServingError):
    """`field` names the parameter in the caller's spelling; `problem` says what is wrong and what is allowed."""

    kind = "invalid"

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}" if field else problem)
        self.field = field
        self.problem = problem


class NotFound(ServingError):
    """No such model, adapter, request or path."""

    kind = "not_found"


class Overloaded(ServingError):
    """As many requests as allowed are running or waiting; the same request may succeed later."""

    kind = "overloaded"


class Unavailable(ServingError):
    """The model is starting, restarting, asleep or stopping; the same request may succeed later."""

    kind = "unavailable"


class GenerationFailed(ServingError):
    """The model ended the request with an error after it was accepted."""

    kind = "generation"


class TimedOut(ServingError):
    """The request took longer than this server gives one."""

    kind = "timeout"


class ModelError(ServingError):
    """The model cannot be loaded, or its files or device cannot be used."""

    kind = "model"


class OutOfMemory(ModelError):
    """The message says which number of the configuration to lower."""
