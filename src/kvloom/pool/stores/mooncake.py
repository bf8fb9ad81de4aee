"""Mooncake Store (extra `mooncake`). It has no credentials and listens on all interfaces: keep its ports private.

`mooncake://MASTER:PORT?host=OWN_ADDRESS&metadata=URL&protocol=tcp&segment=SIZE`: `host` is this node's address in
the store's network, `segment` the memory this node gives to the store (0 = it only uses the others').
"""

import secrets
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

from mooncake.store import MooncakeDistributedStore

from kvloom.pool.config import parse_size
from kvloom.pool.stores.engine import EngineError, EngineFull

_BUFFER_BYTES = 256 << 20  # the store's client's local buffer for values under way; `segment` is what it stores
_FIRST_PORT, _NUM_PORTS = 20000, 12000  # below the range of ports that the system assigns
_NO_ROOM = -200  # the store's code for a put that finds no memory
_OPTIONS = {"host", "metadata", "protocol", "devices", "segment"}


def connect(address: str, password: str) -> "MooncakeEngine":
    """A client of the store at a URL. Raises ValueError for a wrong URL, EngineError when setup fails."""
    if password:
        raise ValueError("engine: Mooncake Store has no password; leave out the password file")
    parts = urlsplit(address)
    options = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    unknown = sorted(options.keys() - _OPTIONS)
    if unknown:
        raise ValueError(f"engine: unknown option {unknown[0]}")
    if not parts.netloc or "host" not in options:
        raise ValueError("engine: needs mooncake://master:port?host=own_address")
    segment = options.get("segment", "0")
    store = MooncakeDistributedStore()
    # a random port at every start: the store refuses a name that it still remembers
    port = _FIRST_PORT + secrets.randbelow(_NUM_PORTS)
    code = store.setup(
        f"{options['host']}:{port}",
        options.get("metadata", "P2PHANDSHAKE"),
        0 if segment == "0" else parse_size(segment),
        _BUFFER_BYTES,
        options.get("protocol", "tcp"),
        options.get("devices", ""),
        parts.netloc,
    )
    if code:
        raise EngineError(f"engine {address}: setup failed with code {code}")
    return MooncakeEngine(store)


class MooncakeEngine:
    """Implements `Engine`."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def put(self, names: Sequence[str], values: Sequence[bytes]) -> None:
        code = self._store.put_batch(list(names), list(values))
        if code:
            raise (EngineFull if code == _NO_ROOM else EngineError)(f"put failed with code {code}")

    def get(self, names: Sequence[str]) -> list[memoryview | None]:
        """The buffers belong to the store's client; each lives as long as its view."""
        handles = self._store.batch_get_buffer(list(names))
        return [None if handle is None else memoryview(handle).cast("B") for handle in handles]

    def has(self, names: Sequence[str]) -> list[bool]:
        codes = self._store.batch_is_exist(list(names))
        if any(code < 0 for code in codes):
            raise EngineError(f"is_exist failed with code {min(codes)}")
        return [code == 1 for code in codes]

    def close(self) -> None:
        self._store.close()
