"""The JSON of the ABI: session attributes and requests in, replies out. Unknown fields are ignored. Pure."""

from dataclasses import dataclass
from typing import Any

import msgspec

from kvloom.gewu.codes import Code, Refused
from kvloom.gewu.qos import Level

MAX_DEPTH = 64
ROLES = ("developer", "user", "assistant")
# The platform's names of accelerators are wishes: the engine takes what the device has.
BACKEND_WISHES = ("auto", "cpu", "gpu", "cuda", "npu", "knpu")


@dataclass(frozen=True, slots=True)
class Attributes:
    """Of a session."""

    model: str  # path, in the caller's words
    level: Level | None = None
    max_ctx: int | None = None  # tokens
    keep_alive_s: float | None = None  # replaces the service's idle time for this session's model


@dataclass(frozen=True, slots=True)
class Chat:
    """A request. Sampling is greedy unless a temperature is given."""

    messages: tuple[tuple[str, str], ...]  # role, content
    is_streamed: bool = False
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()


def parse_attributes(data: bytes) -> Attributes:
    """Raises Refused (INVAL; NOSYS for an unknown back end)."""
    fields = _object(data)
    model = fields.get("model")
    if not isinstance(model, str) or not model or "\0" in model:
        raise _invalid("model", "must be a path")
    settings = fields.get("eval_settings")
    if isinstance(settings, str):
        settings = _object(settings.encode())
    if settings is not None and not isinstance(settings, dict):
        raise _invalid("eval_settings", "must be an object")
    settings = settings or {}
    backend = settings.get("backend", "auto")
    if not isinstance(backend, str):
        raise _invalid("backend", "must be a string")
    if backend.lower() not in BACKEND_WISHES:
        raise Refused(Code.NOSYS, f"backend {backend!r} is not one of {', '.join(BACKEND_WISHES)}")
    return Attributes(
        model,
        _level(fields.get("qos")),
        _integer("max_ctx", settings.get("max_ctx"), 1),
        _number("keep_alive_s", fields.get("keep_alive_s"), 0, 1e9),
    )


def parse_chat(data: bytes) -> Chat:
    """Raises Refused (INVAL)."""
    fields = _object(data)
    is_streamed = fields.get("stream")
    if is_streamed is not None and not isinstance(is_streamed, bool):
        raise _invalid("stream", "must be a boolean or null")
    temperature = _number("temperature", fields.get("temperature"), 0, 100)
    top_p = _number("top_p", fields.get("top_p"), 0, 1)
    if top_p == 0:
        raise _invalid("top_p", "must be above 0")
    return Chat(
        _messages(fields.get("messages")),
        bool(is_streamed),
        _integer("max_tokens", fields.get("max_tokens"), 1),
        0.0 if temperature is None else temperature,
        1.0 if top_p is None else top_p,
        _integer("seed", fields.get("seed"), 0),
        _stop(fields.get("stop")),
    )


def reply(content: str, finish_reason: str | None, error: tuple[Code, str] | None = None) -> bytes:
    """A reply as the callback gets it: raw UTF-8, `content` always a string, both keys always there."""
    body: dict[str, Any] = {"message": {"role": "assistant", "content": content}, "finish_reason": finish_reason}
    if error is not None:
        body["error"] = {"code": int(error[0]), "message": error[1]}
    return msgspec.json.encode(body)


def _messages(value: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise _invalid("messages", "must be a non-empty array")
    found = []
    for message in value:
        if not isinstance(message, dict):
            raise _invalid("messages", "every element must be an object")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise _invalid("role", f"must be one of {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise _invalid("content", "must be a string")
        found.append((role, content))
    if found[-1][0] == "assistant":
        raise _invalid("messages", "the last one must not be the assistant's")
    return tuple(found)


def _stop(value: object) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise _invalid("stop", "must be a non-empty string or an array of them")
    return tuple(texts)


def _level(value: object) -> Level | None:
    if value is None:
        return None
    if isinstance(value, str) and value.upper() in Level.__members__:
        return Level[value.upper()]
    number = _integer("qos", value, 0)
    if number is None or number > max(Level):
        raise _invalid("qos", f"must be 0 to {int(max(Level))} or a level's name")
    return Level(number)


def _integer(field: str, value: object, low: int) -> int | None:
    """An integer, or a string that is one."""
    if value is None:
        return None
    if isinstance(value, str) and value.removeprefix("-").isdecimal() and len(value) <= 20:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value < 2**63:
        raise _invalid(field, f"must be an integer of at least {low}")
    return value


def _number(field: str, value: object, low: float, high: float) -> float | None:
    if value is None:
        return None
    if isinstance(value, str):
        value = _integer(field, value, 0)
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise _invalid(field, f"must be a number between {low:g} and {high:g}")
    return float(value)


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(Code.INVAL, f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Refused(Code.INVAL, "must be a JSON object")
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [child for item in level for child in _children(item)]
        if not level:
            return value
    raise Refused(Code.INVAL, f"nested deeper than {MAX_DEPTH}")


def _children(value: object) -> list[Any]:
    """The containers inside a container."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [item for item in items if isinstance(item, dict | list)]


def _invalid(field: str, problem: str) -> Refused:
    return Refused(Code.INVAL, f"{field}: {problem}")
