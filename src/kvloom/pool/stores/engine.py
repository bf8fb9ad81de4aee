"""Engine: the interface of a distributed store for an agent, and how one is opened from its URL."""

import importlib
from collections.abc import Sequence
from typing import Protocol
from urllib.parse import urlsplit


class EngineError(Exception):
    """The store cannot be reached or refused the call."""


class EngineFull(EngineError):
    """The store answers, but takes no values: it is full, or may only be read."""


class Engine(Protocol):
    """Values by name. Calls may block for as long as the store likes, from any thread, and raise EngineError.

    What `get` returns is memory of its own, so a result that comes too late can be dropped without harm.
    """

    def put(self, names: Sequence[str], values: Sequence[bytes]) -> None:
        """Store values; whether an existing value is replaced is up to the store. Raises EngineFull where it takes
        none.
        """
        ...

    def get(self, names: Sequence[str]) -> list[memoryview | None]:
        """Each value, None only where the store has none, not where it lacks memory to hand it out; in memory of its
        own.
        """
        ...

    def has(self, names: Sequence[str]) -> list[bool]:
        """Whether each name is there."""
        ...

    def close(self) -> None:
        """Ends the connection; calls under way may fail."""
        ...


_MODULES = {
    "valkey": "valkey",
    "valkeys": "valkey",
    "valkey+cluster": "valkey",
    "valkeys+cluster": "valkey",
    "unix": "valkey",
    "mooncake": "mooncake",
}


def open_engine(address: str, password: str) -> Engine:
    """The store at a URL (`valkey://host:6379`, `unix:///path`, `mooncake://master:50051?host=...`).

    Raises ValueError when the URL or the extra it needs is not there, EngineError when the store does not answer.
    """
    scheme = urlsplit(address).scheme
    if scheme not in _MODULES:
        raise ValueError(f"engine: {scheme or address!r} is none of {', '.join(sorted(_MODULES))}")
    name = _MODULES[scheme]
    try:
        module = importlib.import_module(f"kvloom.pool.stores.{name}")
    except ImportError as error:
        raise ValueError(f"engine: needs `pip install kvloom[{name}]` ({error})") from None
    opened: Engine = module.connect(address, password)
    return opened
