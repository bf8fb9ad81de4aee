"""Counts: what happened so far, by name, as several threads count it."""

import threading
from collections.abc import Iterator, Mapping
from enum import StrEnum


class Denial(StrEnum):
    """Why a whole request was refused, or its connection ended."""

    REVOKED = "revoked"  # the access key that the session was opened with
    STAGING = "staging"  # all of the staging memory was in use until half of the call's time was over
    NO_MEMORY = "no_memory"  # the system gave none for a staging area
    INVALID = "invalid"  # a size, a segment or a part of the staging area that cannot be
    NOT_DIRECT = "not_direct"  # memory was to be reserved, which only an agent with --direct does
    LEASES = "leases"  # the session reads too many batches at once
    MALFORMED = "malformed"  # no frame, or none that was expected
    LATE = "late"  # the client did not say in time who it is, or did not take its answer
    NO_THREAD = "no_thread"  # the system gave no thread for the caller

    @property
    def counter(self) -> str:
        """As counts name it."""
        return f"denied_{self}"


class Counts(Mapping[str, int]):
    """Any thread may call. A name that nobody has counted is 0; it does not stand in the list of names."""

    def __init__(self) -> None:
        self._values: dict[str, int] = {}
        self._lock = threading.Lock()

    def add(self, name: str, count: int = 1) -> None:
        """So often more. `counts[name] += count` would lose what another thread adds between its two halves."""
        with self._lock:
            self._values[name] = self._values.get(name, 0) + count

    def raise_to(self, name: str, value: int) -> None:
        """So often, as somebody else has counted; never less than before."""
        with self._lock:
            self._values[name] = max(self._values.get(name, 0), value)

    def __getitem__(self, name: str) -> int:
        return self._values.get(name, 0)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._values))

    def __len__(self) -> int:
        return len(self._values)
