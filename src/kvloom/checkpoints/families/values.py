"""Values of a checkpoint's configuration, checked, because the file may be wrong or hostile."""

import math
from collections.abc import Mapping
from typing import Any

from kvloom.contract.config import MAX_COUNT
from kvloom.contract.errors import ModelError

_MOST = {"num_hidden_layers": 1 << 12, "head_dim": 1 << 12, "num_attention_heads": 1 << 16}  # else MAX_COUNT


def count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive integer. Raises ModelError."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ModelError(f"configuration: {key} must be a positive whole number, got {short(value)}")
    if value > (most := _MOST.get(key, MAX_COUNT)):
        raise ModelError(f"configuration: {key} is {short(value)}, more than {most}")
    return value


def natural(config: Mapping[str, Any], key: str) -> int:
    """A number from 0 on; 0 if it is missing or null. Raises ModelError."""
    return count(config, key) if config.get(key) else 0


def real(config: Mapping[str, Any], key: str, default: float) -> float:
    """A number; `default` if it is missing or null. Raises ModelError."""
    value = config.get(key)
    value = default if value is None else value
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ModelError(f"configuration: {key} must be a number, got {short(value)}")
    return number


def reals(config: Mapping[str, Any], key: str, number: int) -> list[float]:
    """`number` numbers; ones if they are missing or null. Raises ModelError."""
    given = config.get(key)
    values = [1.0] * number if given is None else given
    if not isinstance(values, list | tuple) or len(values) != number:
        raise ModelError(f"configuration: {key} must be {number} numbers, got {short(given)}")
    return [real({key: value}, key, 1.0) for value in values]


def positive(config: Mapping[str, Any], key: str, default: float) -> float:
    """As `real`, above zero."""
    number = real(config, key, default)
    if number <= 0:
        raise ModelError(f"configuration: {key} must be positive, got {short(number)}")
    return number


def flag(config: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """true or false, also as 1 or 0; `default` if it is missing or null. Raises ModelError: "false" would be true."""
    value = config.get(key)
    value = default if value is None else value
    if value not in (True, False):
        raise ModelError(f"configuration: {key} must be true or false, got {short(value)}")
    return bool(value)


def short(value: object) -> str:
    """The value for a message, shortened: integers may have thousands of digits."""
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than Python prints
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:77]}..."
