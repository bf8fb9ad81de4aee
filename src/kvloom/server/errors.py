"""Which status an error has in each family of routes, and how its body looks. The one table."""

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from kvloom.contract.errors import BadRequest, ServingError

# kind of error: status under /v1, status elsewhere, error_type elsewhere (TGI's words, which its clients know)
TABLE: dict[str, tuple[int, int, str]] = {
    "invalid": (400, 422, "validation"),
    "not_found": (404, 404, "validation"),
    "overloaded": (429, 429, "overloaded"),
    "unavailable": (503, 503, "unavailable"),
    "slow": (408, 408, "timeout"),
    "too_large": (413, 413, "validation"),
    "method": (405, 405, "validation"),
    "forbidden": (403, 403, "forbidden"),
    "media_type": (415, 415, "validation"),
    "misdirected": (421, 421, "validation"),
    "timeout": (504, 504, "timeout"),
    "generation": (500, 424, "generation"),
    "model": (500, 500, "incomplete_generation"),
    "internal": (500, 500, "incomplete_generation"),
}
_MAX_CHARS = 2000  # of a message
BUG_TEXT = "the server failed on this request; its log says how"
CODINGS = "gzip, deflate"  # of bodies
Family = Literal["openai", "anthropic", "ollama", "tgi"]
RETRY_AFTER_S = {"overloaded": 1, "unavailable": 2}

_OPENAI_TYPE = {
    "invalid": "invalid_request_error",
    "not_found": "invalid_request_error",
    "slow": "invalid_request_error",
    "too_large": "invalid_request_error",
    "method": "invalid_request_error",
    "forbidden": "permission_error",
    "media_type": "invalid_request_error",
    "misdirected": "invalid_request_error",
    "overloaded": "rate_limit_error",
}
_ANTHROPIC_TYPE = {
    "invalid": "invalid_request_error",
    "not_found": "not_found_error",
    "slow": "invalid_request_error",
    "too_large": "request_too_large",
    "method": "invalid_request_error",
    "forbidden": "permission_error",
    "media_type": "invalid_request_error",
    "misdirected": "invalid_request_error",
    "overloaded": "overloaded_error",
    "unavailable": "overloaded_error",
    "timeout": "timeout_error",
}
_ANTHROPIC_STATUS = {"overloaded_error": 529}  # 429 there is of one account that asks too often
# their first part: OpenAI's with and without /v1, and those of vLLM's server
_OPENAI_PATHS = {"v1", "chat", "completions", "embeddings", "images", "models", "responses"}
_OPENAI_PATHS |= {"decisions", "systemone"}
_VLLM_PATHS = {"tokenize", "detokenize", "tokenizer_info", "version", "load", "server_info", "reset_prefix_cache"}
_VLLM_PATHS |= {"sleep", "wake_up", "is_sleeping", "rerank", "score", "load_model"}
_OPENAI_CODE = {"not_found": "model_not_found", "overloaded": "rate_limit_exceeded"}


class TooLarge(ServingError):
    """A body, or what it unpacks to, beyond the limit."""

    kind = "too_large"


class BodyTooSlow(ServingError):
    """A body that has not arrived in time; its connection cannot be used again."""

    kind = "slow"


class WrongEncoding(ServingError):
    """A body in a content coding that is not unpacked here."""

    kind = "media_type"


class AnswerTooLong(BadRequest):
    """More tokens are asked for than the context has beside the prompt. The message is OpenAI's."""

    def __init__(self, field: str, num_prompt: int, max_tokens: int, context: int) -> None:
        super().__init__(field, "exceeds the context")
        self.text = (
            f"This model's maximum context length is {context} tokens. However, you requested "
            f"{num_prompt + max_tokens} tokens ({num_prompt} in the prompt, {max_tokens} in the completion). "
            f"Please reduce the length of the prompt or {field}."
        )

    def __str__(self) -> str:
        return self.text


class PromptTooLong(BadRequest):
    """A prompt of more than `limit` tokens. The message is OpenAI's, which its clients look for.

    `is_exact`: else it has `num_tokens` at least. `context`: the model's tokens, prompt and answer together.
    """

    def __init__(self, field: str, num_tokens: int, limit: int, context: int, is_exact: bool = True) -> None:
        self.num_tokens, self.limit = num_tokens, limit
        self.count = str(num_tokens) if is_exact else f"at least {num_tokens}"
        what = field or "prompt"
        most = f", of which prompts have at most {limit}" if limit < context - 1 else ""
        super().__init__(
            field,
            f"This model's maximum context length is {context} tokens{most}. However, your {what} resulted in "
            f"{self.count} tokens. Please reduce the length of the {what}.",
        )

    def __str__(self) -> str:
        return self.problem


class WrongMethod(ServingError):
    """The route is there, for other methods."""

    kind = "method"


class Forbidden(ServingError):
    """A page of another site asks."""

    kind = "forbidden"


class WrongMediaType(ServingError):
    """A body of a type that the route does not read."""

    kind = "media_type"


class Misdirected(ServingError):
    """Asked under a name that is not this server's."""

    kind = "misdirected"


class NoRoute(ServingError):
    """No such path; a model that does not exist is engine.errors.NotFound."""

    kind = "not_found"


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """What a dialect sends instead of an answer."""

    status: int
    body: bytes
    headers: dict[str, str]


def told(error: ServingError) -> str:
    """Its text, cut where it quotes too much of a request."""
    text = str(error)
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}…"


def openai_error(error: ServingError) -> dict[str, Any]:
    """OpenAI's error object."""
    code = None if isinstance(error, NoRoute) else _OPENAI_CODE.get(error.kind)
    if isinstance(error, AnswerTooLong | PromptTooLong):
        code = "context_length_exceeded"
    code = getattr(error, "code", code)
    return {
        "error": {
            "message": told(error),
            "type": _OPENAI_TYPE.get(error.kind, "server_error"),
            "param": getattr(error, "field", None) or None,
            "code": code,
        }
    }


def openai_reply(error: ServingError) -> ErrorReply:
    return ErrorReply(TABLE[error.kind][0], msgspec.json.encode(openai_error(error)), _headers(error))


def anthropic_error(error: ServingError) -> dict[str, Any]:
    """Anthropic's error object."""
    text = told(error)
    if isinstance(error, PromptTooLong):
        text = f"prompt is too long: {error.count} tokens > {error.limit} maximum"
    return {"type": "error", "error": {"type": _ANTHROPIC_TYPE.get(error.kind, "api_error"), "message": text}}


def anthropic_reply(error: ServingError) -> ErrorReply:
    """Statuses are those of /v1, and Anthropic's 529 for a server that is busy, starting or stopping."""
    return ErrorReply(status_of(error.kind, "anthropic"), msgspec.json.encode(anthropic_error(error)), _headers(error))


def tgi_error(error: ServingError) -> dict[str, Any]:
    """TGI's error object, which is Open Inference Protocol's too."""
    text = told(error)
    return {"error": text, "error_type": TABLE[error.kind][2]}


def tgi_reply(error: ServingError) -> ErrorReply:
    return ErrorReply(TABLE[error.kind][1], msgspec.json.encode(tgi_error(error)), _headers(error))


def ollama_error(error: ServingError) -> dict[str, Any]:
    """Ollama's error object."""
    return {"error": told(error)}


def ollama_reply(error: ServingError) -> ErrorReply:
    """Statuses are those of /v1."""
    return ErrorReply(TABLE[error.kind][0], msgspec.json.encode(ollama_error(error)), _headers(error))


def status_of(kind: str, family: Family) -> int:
    """The HTTP status of a kind of error."""
    of_v1, elsewhere, _ = TABLE[kind]
    if family == "anthropic":
        return _ANTHROPIC_STATUS.get(_ANTHROPIC_TYPE.get(kind, ""), of_v1)
    return elsewhere if family == "tgi" else of_v1


def family_of(path: str) -> Family:
    """Whose errors a path has."""
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return "anthropic"
    if path.startswith("/api/"):
        return "ollama"
    is_openai = path == "/v2/rerank" or path.strip("/").partition("/")[0] in _OPENAI_PATHS | _VLLM_PATHS
    return "openai" if is_openai else "tgi"


def reply_for_path(path: str, error: ServingError) -> ErrorReply:
    """An error outside of any dialect: no route, a bug."""
    replies = {"openai": openai_reply, "anthropic": anthropic_reply, "ollama": ollama_reply, "tgi": tgi_reply}
    return replies[family_of(path)](error)


def _headers(error: ServingError) -> dict[str, str]:
    retry_s = RETRY_AFTER_S.get(error.kind)
    headers = {"Retry-After": str(retry_s)} if retry_s else {}
    if isinstance(error, BodyTooSlow):
        headers["Connection"] = "close"
    return headers | ({"Accept-Encoding": CODINGS} if isinstance(error, WrongEncoding) else {})
