"""Which status an error has in each family of routes, and how its body looks. The one table."""

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from kvloom.engine.errors import ServingError

# kind of error: status under /v1, status elsewhere, error_type elsewhere (TGI's words, which its clients know)
TABLE: dict[str, tuple[int, int, str]] = {
    "invalid": (400, 422, "validation"),
    "not_found": (404, 404, "validation"),
    "overloaded": (429, 429, "overloaded"),
    "unavailable": (503, 503, "unavailable"),
    "too_large": (413, 413, "validation"),
    "method": (405, 405, "validation"),
    "generation": (500, 424, "generation"),
    "model": (500, 500, "incomplete_generation"),
    "internal": (500, 500, "incomplete_generation"),
}
BUG_TEXT = "the server failed on this request; its log says how"
RETRY_AFTER_S = {"overloaded": 1, "unavailable": 2}

_OPENAI_TYPE = {
    "invalid": "invalid_request_error",
    "not_found": "invalid_request_error",
    "too_large": "invalid_request_error",
    "method": "invalid_request_error",
    "overloaded": "rate_limit_error",
}
_ANTHROPIC_TYPE = {
    "invalid": "invalid_request_error",
    "not_found": "not_found_error",
    "too_large": "request_too_large",
    "method": "invalid_request_error",
    "overloaded": "rate_limit_error",
    "unavailable": "overloaded_error",
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
    return ErrorReply(TABLE[error.kind][0], msgspec.json.encode(openai_error(error)), _headers(error))


def anthropic_error(error: ServingError) -> dict[str, Any]:
    """Anthropic's error object."""
    return {"type": "error", "error": {"type": _ANTHROPIC_TYPE.get(error.kind, "api_error"), "message": str(error)}}


def anthropic_reply(error: ServingError) -> ErrorReply:
    """Statuses are those of /v1."""
    return ErrorReply(TABLE[error.kind][0], msgspec.json.encode(anthropic_error(error)), _headers(error))


def tgi_error(error: ServingError) -> dict[str, Any]:
    """TGI's error object, which is Open Inference Protocol's too."""
    text = str(error)
    return {"error": text, "error_type": TABLE[error.kind][2]}


def tgi_reply(error: ServingError) -> ErrorReply:
    return ErrorReply(TABLE[error.kind][1], msgspec.json.encode(tgi_error(error)), _headers(error))


def family_of(path: str) -> Literal["openai", "anthropic", "tgi"]:
    """Whose errors a path has."""
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return "anthropic"
    return "openai" if path.startswith("/v1/") or path in ("/tokenize", "/detokenize") else "tgi"


def reply_for_path(path: str, error: ServingError) -> ErrorReply:
    """An error outside of any dialect: no route, a bug."""
    replies = {"openai": openai_reply, "anthropic": anthropic_reply, "tgi": tgi_reply}
    return replies[family_of(path)](error)


def _headers(error: ServingError) -> dict[str, str]:
    retry_s = RETRY_AFTER_S.get(error.kind)
    return {"Retry-After": str(retry_s)} if retry_s else {}
