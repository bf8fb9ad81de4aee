"""Fields of other tools' configurations. Their next releases have more: only known ones are passed over."""

from collections.abc import Collection, Mapping
from typing import Any

NO_VALUES: Mapping[str, tuple[object, ...]] = {}


def unknown_field(
    values: Mapping[str, Any], known: Collection[str], plain: Mapping[str, tuple[object, ...]] = NO_VALUES
) -> str | None:
    """The first field that would change what is computed, or might; None without one.

    `known`: fields that the caller reads, and those that change nothing whatever their value. `plain`: the values of
    other fields that change nothing. What is null, false or empty is unset.
    """
    for name, value in values.items():
        if name not in known and not _is_unset(value) and not any(_same(value, one) for one in plain.get(name, ())):
            return name
    return None


def _is_unset(value: object) -> bool:
    return value is None or value is False or value in ("", [], {})


def _same(value: object, other: object) -> bool:
    """Equal, where true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
