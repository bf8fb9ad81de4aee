"""Arguments of the client, checked before anything is sent: spec 4.3.1.2."""

import math
import re
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from mindieclient.python.httpclient.errors import MindIEClientException

MAX_NAME_CHARS = 256
MAX_CONCURRENCY = 300
MAX_SEED = 2**64 - 1
MAX_TOP_K = 2**31 - 1
MAX_TIME_S = 1e9  # 30 years; the system's clocks refuse 300
_SHOWN_CHARS = 300

# Spec 4.3.1.2 allows letters, digits, "-" and "_"; published models' names also contain ".", ":" and "/". No part
# between slashes may begin with ".", which would change the path.
_PART = r"[A-Za-z0-9_-][A-Za-z0-9_.:-]*"
_NAME = re.compile(rf"{_PART}(?:/{_PART})*")
_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,256}")


def shown(value: object) -> str:
    """The value as messages name it: the beginning of its repr."""
    try:
        text = repr(value)
    except Exception:  # an integer of more than 4,300 digits, or whatever a type of the program's own raises
        return f"one of type {type(value).__name__} that cannot be printed"
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def check_model(model_name: object, model_version: object) -> str:
    """The path of a model below the server's root."""
    _check_name("model_name", model_name)
    if model_version == "":
        return f"/v2/models/{model_name}"
    _check_name("model_version", model_version)
    return f"/v2/models/{model_name}/versions/{model_version}"


def _check_name(argument: str, value: object) -> None:
    if not isinstance(value, str) or len(value) > MAX_NAME_CHARS or not _NAME.fullmatch(value):
        raise MindIEClientException(
            f"{argument} must be 1 to {MAX_NAME_CHARS} letters, digits, '-', '_', '.', ':' or '/', "
            f"not '.' first nor after '/': {shown(value)}"
        )


def check_request_id(value: object, *, optional: bool) -> str:
    """A request id of 1 to 256 letters, digits, "-" or "_"; may be "" if `optional`. Raises MindIEClientException."""
    if optional and value == "":
        return ""
    if not isinstance(value, str) or not _REQUEST_ID.fullmatch(value):
        raise MindIEClientException(f"request_id must be 1 to 256 letters, digits, '-' or '_': {shown(value)}")
    return value


def check_prompt(value: object) -> str:
    """A prompt that is not empty. Raises MindIEClientException."""
    if not isinstance(value, str) or not value:
        raise MindIEClientException("prompt must be a string that is not empty")
    return value


def check_positive(argument: str, value: object) -> float:
    """A number of seconds above 0, at most MAX_TIME_S. Raises MindIEClientException that names the argument."""
    return _real(argument, value, above=0.0, most=MAX_TIME_S)


def check_api_key(value: object) -> str | None:
    """What a header can carry. Raises MindIEClientException, without the key."""
    if value is not None and not (isinstance(value, str) and value.isascii() and value.isprintable()):
        raise MindIEClientException("api_key must be a string of printable ASCII characters")
    return value


def check_count(argument: str, value: object, least: int, most: int) -> int:
    """An integer from `least` to `most`. Raises MindIEClientException that names the argument."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) <= most:
        raise MindIEClientException(f"{argument} must be an integer in [{least}, {most}]: {shown(value)}")
    return int(value)


def check_parameters(parameters: object) -> dict[str, Any]:
    """The parameters of a request as plain JSON values; those that are None are left out.

    Names that the specification does not list are passed on unchanged: the server decides about them.
    """
    if parameters is None:
        return {}
    if not isinstance(parameters, Mapping):
        raise MindIEClientException(f"parameters must be a dict: {type(parameters).__name__}")
    given = {str(name): _parameter(name, value) for name, value in parameters.items() if value is not None}
    if given.get("typical_p") == 1.0:
        del given["typical_p"]  # means off, which the server refuses if it is sent
    return given


_COUNTS = {
    "seed": (1, MAX_SEED),
    "top_k": (0, MAX_TOP_K),
    "batch_size": (1, MAX_TOP_K),
    "truncate": (1, MAX_TOP_K),
    "max_new_tokens": (1, MAX_TOP_K),
}
_REALS = {"temperature": math.inf, "repetition_penalty": math.inf, "top_p": 1.0, "typical_p": 1.0}
_SWITCHES = {"do_sample", "details", "watermark"}


def _parameter(name: object, value: Any) -> Any:
    if name in _COUNTS:
        return check_count(f"parameters[{name!r}]", value, *_COUNTS[str(name)])
    if name in _REALS:
        return _real(f"parameters[{name!r}]", value, above=0.0, most=_REALS[str(name)])
    if name in _SWITCHES and not isinstance(value, bool):
        raise MindIEClientException(f"parameters[{name!r}] must be True or False: {shown(value)}")
    return value


def _real(argument: str, value: object, above: float, most: float) -> float:
    if not isinstance(value, bool) and isinstance(value, Real):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number) and above < number <= most:
            return number
    limit = f"in ({above:g}, {most:g}]" if math.isfinite(most) else f"above {above:g} and finite"
    raise MindIEClientException(f"{argument} must be a number {limit}: {shown(value)}")
