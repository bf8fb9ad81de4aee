"""Counts: named event counters for several threads."""

import threading
from collections.abc import Iterator, Mapping
from enum import StrEnum


class Denial(StrEnum):
    """Why a request was refused, or its connection was closed."""

    REVOKED = "revoked"  # the session's access key was revoked
    STAGING = "staging"  # all staging memory was in use until half of the call's time had passed
    NO_MEMORY = "no_memory"  # the system gave no memory for a staging area
    INVALID = "invalid"  # an invalid size, segment or part of the staging area
    NOT_DIRECT = "not_direct"  # the client asked for memory to write to, which needs an agent with --direct
    LEASES = "leases"  # the session has too many leases
    MALFORMED = "malformed"  # not a frame, or not one that was expected
    LATE = "late"  # the client did not log in, or did not read its answer, in time
    NO_THREAD = "no_thread"  # no thread available for the caller

    @property
    def counter(self) -> str:
        """The name of its counter."""
        return f"denied_{self}"


class Counts(Mapping[str, int]):
    """May be called from any thread. A name that was never counted is 0, and missing from the list of names."""

    def __init__(self) -> None:
        self._values: dict[str, int] = {}
        self._lock = threading.Lock()

    def add(self, name: str, count: int = 1) -> None:
        """Add to a counter; `counts[name] += count` would not be atomic."""
        with self._lock:
            self._values[name] = self._values.get(name, 0) + count

    def raise_to(self, name: str, value: int) -> None:
        """Raise a counter to a value that was counted elsewhere; it never falls."""
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
