"""Mooncake Store (extra `mooncake`). It has no credentials and listens on all interfaces: keep its ports private.

`mooncake://MASTER:PORT?host=OWN_ADDRESS&metadata=URL&protocol=tcp&segment=SIZE`: `host` is this node's address in
the store's network, `segment` the memory this node gives to the store (0 = it only uses the others').
"""

import contextlib
import secrets
import threading
from collections.abc import Iterator, Sequence
from itertools import compress
from typing import Any
from urllib.parse import parse_qs, urlsplit

from mooncake.store import MooncakeDistributedStore

from kvloom.pool.config import parse_size
from kvloom.pool.stores.engine import EngineError, EngineFull

_BUFFER_BYTES = 320 << 20  # the client's local buffer for values under way: room for any block; not what it stores
_PART_BYTES = 32 << 20  # most bytes of one call, without its last value
_UNKNOWN_BYTES = 16 << 20  # assumed size of values of which none has come yet
_FIRST_PORT, _NUM_PORTS = 20000, 12000  # below the range of ports that the system assigns
_NO_ROOM = -200  # the store's code for a put that finds no memory
_REFUSED = -600  # its code for a put that finds no room in the client's buffer, and for other wrong arguments
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


class _Room:
    """The client's local buffer, shared by calls. What does not fit into it fails, so calls wait for room here."""

    def __init__(self, size: int) -> None:
        self.size = self._free = size  # bytes
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def of(self, num_bytes: int) -> Iterator[None]:
        """Room for values of `num_bytes` in all, or the whole buffer."""
        taken = min(self.size, num_bytes)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= taken)
            self._free -= taken
        try:
            yield
        finally:
            with self._changed:
                self._free += taken
                self._changed.notify_all()


def _held(size: int) -> int:
    """What a value occupies in the buffer: its allocator rounds up to an eighth of a power of two."""
    return size + (size >> 3) + 8


def _parts(sizes: Sequence[int]) -> Iterator[tuple[slice, int]]:
    """Cuts values into calls: (which, bytes in the buffer)."""
    start, held = 0, 0
    for i, size in enumerate(sizes):
        if i > start and held >= _PART_BYTES:
            yield slice(start, i), held
            start, held = i, 0
        held += _held(size)
    if start < len(sizes):
        yield slice(start, len(sizes)), held


class MooncakeEngine:
    """Implements `Engine`."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._room = _Room(_BUFFER_BYTES)
        self._largest = _UNKNOWN_BYTES  # bytes of the largest value that came

    def put(self, names: Sequence[str], values: Sequence[bytes]) -> None:
        for part, held in _parts(list(map(len, values))):
            with self._room.of(held):
                code = self._put(names[part], values[part])
            if code == _REFUSED:  # the buffer's free room was in pieces
                with self._room.of(self._room.size):
                    code = self._put(names[part], values[part])
            if code:
                raise (EngineFull if code == _NO_ROOM else EngineError)(f"put failed with code {code}")

    def _put(self, names: Sequence[str], values: Sequence[bytes]) -> int:
        code: int = self._store.put_batch(list(names), list(values))
        return code

    def get(self, names: Sequence[str]) -> list[memoryview | None]:
        """Copies the values out of the client's buffer, whose room the next call needs. A value that is there and does
        not come has found no room, and is requested again, alone.
        """
        found: list[memoryview | None] = []
        for part, held in _parts([self._largest] * len(names)):
            with self._room.of(held):
                found += self._get(names[part])
        absent = [i for i, value in enumerate(found) if value is None]
        there = self.has([names[i] for i in absent]) if absent else []
        for i in compress(absent, there):
            with self._room.of(self._room.size):
                (found[i],) = self._get([names[i]])
        return found

    def _get(self, names: Sequence[str]) -> list[memoryview | None]:
        handles = self._store.batch_get_buffer(list(names))
        values = [None if handle is None else memoryview(bytes(handle)) for handle in handles]
        self._largest = max([len(value) for value in values if value is not None], default=self._largest)
        return values

    def has(self, names: Sequence[str]) -> list[bool]:
        codes = self._store.batch_is_exist(list(names))
        if any(code < 0 for code in codes):
            raise EngineError(f"is_exist failed with code {min(codes)}")
        return [code == 1 for code in codes]

    def close(self) -> None:
        self._store.close()
