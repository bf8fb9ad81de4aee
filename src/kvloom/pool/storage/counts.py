"""Counts: what happened so far, by name, as several threads count it."""

import threading
from collections.abc import Iterator, Mapping


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
