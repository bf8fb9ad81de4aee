"""The JSON of the ABI: session attributes and requests in, replies out. Unknown fields are ignored. Pure."""

from dataclasses import dataclass
from typing import Any

import msgspec

from kvloom.contract.json_numbers import as_whole
from kvloom.contract.numbers import whole
from kvloom.gewu.codes import Code, Refused
from kvloom.gewu.protocol.jsontext import read_fields, read_value
from kvloom.gewu.qos import Level

_PATH_MAX = 4096  # bytes; Linux's PATH_MAX
ROLES = ("developer", "user", "assistant")
# The platform's accelerator names are hints: the engine takes what the device has.
BACKEND_WISHES = ("auto", "cpu", "gpu", "cuda", "npu", "knpu")


@dataclass(frozen=True, slots=True)
class Attributes:
    """Attributes of a session."""

    model: str  # path, as the app gave it
    level: Level | None = None
    max_ctx: int | None = None  # tokens
    keep_alive_s: float | None = None  # overrides the service's idle time for this session's model


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


class _AttributeFields(msgspec.Struct):
    model: msgspec.Raw = msgspec.Raw()
    eval_settings: msgspec.Raw = msgspec.Raw()
    qos: msgspec.Raw = msgspec.Raw()
    keep_alive_s: msgspec.Raw = msgspec.Raw()


class _Settings(msgspec.Struct):
    backend: msgspec.Raw = msgspec.Raw()
    max_ctx: msgspec.Raw = msgspec.Raw()


class _ChatFields(msgspec.Struct):
    messages: msgspec.Raw = msgspec.Raw()
    stream: msgspec.Raw = msgspec.Raw()
    max_tokens: msgspec.Raw = msgspec.Raw()
    temperature: msgspec.Raw = msgspec.Raw()
    top_p: msgspec.Raw = msgspec.Raw()
    seed: msgspec.Raw = msgspec.Raw()
    stop: msgspec.Raw = msgspec.Raw()


class _Message(msgspec.Struct):
    role: str
    content: str


def parse_attributes(data: bytes) -> Attributes:
    """Raises Refused (INVAL; NOSYS for an unknown back end)."""
    fields = read_fields(data, _AttributeFields)
    model = read_value("model", fields.model)
    if not isinstance(model, str) or not model or "\0" in model or len(model.encode()) >= _PATH_MAX:
        raise _invalid("model", f"must be a path of fewer than {_PATH_MAX} bytes")
    settings = _read_settings(fields.eval_settings)
    backend = read_value("backend", settings.backend)
    if backend is not None and not isinstance(backend, str):
        raise _invalid("backend", "must be a string")
    if (backend or "auto").lower() not in BACKEND_WISHES:
        raise Refused(Code.NOSYS, f"backend {backend!r:.80} is not one of {', '.join(BACKEND_WISHES)}")
    return Attributes(
        model,
        _level(read_value("qos", fields.qos)),
        _integer("max_ctx", read_value("max_ctx", settings.max_ctx), 1),
        _number("keep_alive_s", read_value("keep_alive_s", fields.keep_alive_s), 0, 1e9),
    )


def _read_settings(raw: msgspec.Raw) -> _Settings:
    """`raw` as an object: it is one, or a string that holds one."""
    data = bytes(raw)
    if data.lstrip().startswith(b'"'):
        text = read_value("eval_settings", raw)
        data = text.encode()
    elif data.strip() in (b"", b"null"):
        return _Settings()
    if not data.lstrip().startswith(b"{"):
        raise _invalid("eval_settings", "must be an object")
    return read_fields(data, _Settings)


def parse_chat(data: bytes) -> Chat:
    """Raises Refused (INVAL)."""
    fields = read_fields(data, _ChatFields)
    is_streamed = read_value("stream", fields.stream)
    if is_streamed is not None and not isinstance(is_streamed, bool):
        raise _invalid("stream", "must be a boolean or null")
    temperature = _number("temperature", read_value("temperature", fields.temperature), 0, 100)
    top_p = _number("top_p", read_value("top_p", fields.top_p), 0, 1)
    if top_p == 0:
        raise _invalid("top_p", "must be above 0")
    return Chat(
        _messages(read_value("messages", fields.messages, list[_Message])),
        bool(is_streamed),
        _integer("max_tokens", read_value("max_tokens", fields.max_tokens), 1),
        0.0 if temperature is None else temperature,
        1.0 if top_p is None else top_p,
        _integer("seed", read_value("seed", fields.seed), 0),
        _stop(read_value("stop", fields.stop)),
    )


def reply(content: str, finish_reason: str | None, error: tuple[Code, str] | None = None) -> bytes:
    """The JSON of a reply as the callback gets it: raw UTF-8; `content` is always a string, both keys are always
    present.
    """
    body: dict[str, Any] = {"message": {"role": "assistant", "content": content}, "finish_reason": finish_reason}
    if error is not None:
        body["error"] = {"code": int(error[0]), "message": error[1]}
    return msgspec.json.encode(body)


def waiting(why: str | None) -> bytes:
    """A reply without text: the request is paused because of `why`; None = it continues."""
    message = {"role": "assistant", "content": ""}
    return msgspec.json.encode({"message": message, "finish_reason": None, "waiting": why})


def _messages(messages: list[_Message] | None) -> tuple[tuple[str, str], ...]:
    if not messages:
        raise _invalid("messages", "must be a non-empty array")
    for message in messages:
        if message.role not in ROLES:
            raise _invalid("role", f"must be one of {', '.join(ROLES)}")
    if messages[-1].role == "assistant":
        raise _invalid("messages", "the last one must not be the assistant's")
    return tuple((message.role, message.content) for message in messages)


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
    if isinstance(value, str) and (number := whole(value.removeprefix("-"))) is not None:
        value = -number if value.startswith("-") else number
    value = as_whole(value)
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


def _invalid(field: str, problem: str) -> Refused:
    return Refused(Code.INVAL, f"{field}: {problem}")
