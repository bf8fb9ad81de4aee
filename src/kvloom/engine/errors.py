"""What a caller of the engine may see go wrong.

UserError             a command prints it, one line, and ends with 1
ServingError
 +- BadRequest       a value of the request is out of range or of the wrong form
 +- NotFound         no such model or request
 +- Overloaded       all places are taken; try again later
 +- Unavailable      starting, restarting or stopping; try again soon
 +- GenerationFailed the model failed under a request that had been accepted
 +- ModelError       a model cannot be loaded (file, format, architecture)
     +- OutOfMemory  ... because weights and KV cache do not fit
"""


class UserError(Exception):
    """Something that a person can put right; one sentence says how. Never holds a secret."""


class ServingError(UserError):
    """Base of what a caller may see. `kind` picks the HTTP status; the message is for people."""

    kind = "internal"


class BadRequest(ServingError):
    """`field` names the parameter as the caller spelt it; `problem` says what is wrong and what is allowed."""

    kind = "invalid"

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}" if field else problem)
        self.field = field
        self.problem = problem


class NotFound(ServingError):
    kind = "not_found"


class Overloaded(ServingError):
    kind = "overloaded"


class Unavailable(ServingError):
    kind = "unavailable"


class GenerationFailed(ServingError):
    kind = "generation"


class ModelError(ServingError):
    kind = "model"


class OutOfMemory(ModelError):
    """The message says which number of the configuration to lower."""
