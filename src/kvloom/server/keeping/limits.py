"""How much a store of responses keeps."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvloom.contract.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a store. Beyond them the least recently used entries of the tenant with the largest share go."""

    max_count: int = 10_000  # entries
    max_bytes: int = 1 << 30
    max_age_s: float = 30 * 86400.0  # since an entry was created or continued


_SETTINGS = (("max_count", "count", 1), ("max_bytes", "mb", 2**20), ("max_age_s", "days", 86400))


def limits_of(settings: Mapping[str, Any]) -> Limits:
    """The limits of a configuration. Raises BadRequest when they are given without a file."""
    given = {
        name: settings[f"response_store_{key}"] * factor
        for name, key, factor in _SETTINGS
        if f"response_store_{key}" in settings
    }
    if given and "response_store" not in settings:
        raise BadRequest("responseStore", "must be given when limits of it are")
    return Limits(**given)
