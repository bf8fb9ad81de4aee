"""Which status an error has in each family of routes, and how its body looks. The one table."""

from dataclasses import dataclass
from typing import Any

import msgspec

from kvloom.engine.errors import ServingError

STATUS: dict[str, int] = {
    "invalid": 400,
    "not_found": 404,
    "overloaded": 429,
    "unavailable": 503,
    "too_large": 413,
    "method": 405,
    "generation": 500,
    "model": 500,
    "internal": 500,
}
RETRY_AFTER_S = {"overloaded": 1, "unavailable": 2}

_OPENAI_TYPE = {
    "invalid": "invalid_request_error",
    "not_found": "invalid_request_error",
    "too_large": "invalid_request_error",
    "method": "invalid_request_error",
    "overloaded": "rate_limit_error",
}
_OPENAI_CODE = {"not_found": "model_not_found", "overloaded": "rate_limit_exceeded"}


class TooLarge(ServingError):
    kind = "too_large"


class WrongMethod(ServingError):
    kind = "method"


class NoRoute(ServingError):
    """No such path; a model that does not exist is engine.errors.NotFound."""

    kind = "not_found"


@dataclass(frozen=True, slots=True)
class ErrorReply:
    status: int
    body: bytes
    headers: dict[str, str]


def openai_error(error: ServingError) -> dict[str, Any]:
    """OpenAI's error object."""
    code = None if isinstance(error, NoRoute) else _OPENAI_CODE.get(error.kind)
    return {
        "error": {
            "message": str(error),
            "type": _OPENAI_TYPE.get(error.kind, "server_error"),
            "param": getattr(error, "field", None) or None,
            "code": code,
        }
    }


def openai_reply(error: ServingError) -> ErrorReply:
    retry_s = RETRY_AFTER_S.get(error.kind)
    headers = {"Retry-After": str(retry_s)} if retry_s else {}
    return ErrorReply(STATUS[error.kind], msgspec.json.encode(openai_error(error)), headers)
