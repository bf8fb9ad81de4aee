"""NativeServing: answers a session's requests in C++ from the pool; other requests are returned to Python.

The session's thread waits, reads and answers without the interpreter lock; it returns with a request that needs the
node.
"""

import ctypes
import errno
import os
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ems.common.channel import Channel
from ems.keys import KEY_BYTES
from ems.runs import address_of
from ems.wire.frames import Frame
from ems.wire.messages import Cause, Status, split_keys
from kvloom.pool.storage.counts import Counts, Denial
from kvloom.pool.storage.entries import Block
from kvloom.pool.storage.native import library as c
from kvloom.pool.storage.native.held import NativeBlock
from kvloom.pool.storage.pool import Terms
from kvloom.pool.storage.segments import SharedMemory

_NEVER = 2**64 - 1  # of the keyring's versions: the key is checked before the first request
_UNCHECKED = -1  # not an error number: the key must be checked first
_SAVED = [f"save_{status.name.lower()}" for status in Status]
_MISSED = [f"miss_{cause.name.lower()}" for cause in Cause]


class Asks(NamedTuple):
    """What a session asks of its pool in Python."""

    look: Callable[[], None]
    grow: Callable[[], bool]
    refuse: Callable[[bytes, int], Status]
    close_left: Callable[[], None]


def callbacks(asks: Asks) -> c.Callbacks:
    """The same for C++; keep a reference as long as C++ may call them."""
    return c.Callbacks(
        c.LOOK(asks.look),
        c.GROW(asks.grow),
        c.REFUSE(lambda key, slot: int(asks.refuse(bytes(key.contents), slot))),
        c.LOOK(asks.close_left),
    )


def node_of(owner: Any, terms: Terms) -> c.Node:
    """What saves ask of the node, for C++. owner: the pool; keep a reference as long as C++ may call it."""
    node, homes = c.Node(), terms.homes
    if terms.may_put is not None:
        node.may_put = c.MAY_PUT(terms.may_put)
    if homes is None:
        return node

    def route(keys: int, num: int, routes: int) -> None:
        ctypes.memmove(routes, homes.routes(split_keys(ctypes.string_at(keys, num * KEY_BYTES))), num)

    def send_now(key: Any, data: int, length: int, parent: Any, deadline_ns: int) -> bool:
        view = np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(data))
        return homes.send_now(bytes(key.contents), view, _key_in(parent), deadline_ns / 1e9)

    def send_later(ids: Any, parents: Any, num: int, deadline_ns: int, are_sent: int) -> None:
        blocks: list[Block] = [NativeBlock(owner, id) for id in ids[:num]]
        sent = homes.send_later(blocks, list(map(_key_in, parents[:num])), deadline_ns / 1e9)
        ctypes.memmove(are_sent, sent, num)

    node.route, node.send_now, node.send_later = c.ROUTE(route), c.SEND_NOW(send_now), c.SEND_LATER(send_later)
    return node


def _key_in(key: Any) -> bytes:
    """A key that may be null."""
    return bytes(key.contents) if key else b""


class Tally:
    """Transfers C++'s counters to counts by name. Used by one thread at a time."""

    def __init__(self, counts: c.Counts) -> None:
        self._counts = counts
        self._num_calls = 0
        self._added: Counter[str] = Counter()

    @property
    def is_behind(self) -> bool:
        """Whether there is something to add."""
        return self._counts.num_calls != self._num_calls

    def add_to(self, counts: Counts) -> None:
        """What was counted since the last time."""
        now, self._num_calls = self._counts, self._counts.num_calls
        named = {**dict(zip(_SAVED, now.saved, strict=False)), **dict(zip(_MISSED, now.missed, strict=False))}
        named |= {"load_keys": now.load_keys, "load_hits": now.load_hits, "corrupt": now.corrupt}
        named[Denial.LEASES.counter] = now.denied_leases
        for name, count in named.items():
            if count != self._added[name]:
                counts.add(name, count - self._added[name])
                self._added[name] = count


class NativeServing:
    """Used by its session's thread only."""

    def __init__(self, owner: Any, channel: Channel, asked: c.Callbacks, terms: Terms) -> None:
        """owner: the pool; it, `asked` and the terms are kept alive."""
        node = node_of(owner, terms)
        self._kept = owner, asked, terms, node
        self._functions: c.Functions = owner.functions
        self._channel = channel
        self._version, self._is_valid = terms.keyring_version, terms.is_valid
        self._valid_at = _NEVER
        inner = c.Terms(
            node,
            owner.copies_share,
            ctypes.pointer(owner.budget_version),
            ctypes.pointer(terms.keyring_version),
            terms.is_direct,
            address_of(terms.board) if terms.board is not None else None,
        )
        short = self._functions.short
        fd, xxh3 = channel.sock.fileno(), self._functions.xxh3
        self._handle: int | None = short.serving_open(owner.handle, fd, xxh3, asked, inner)
        ahead = channel.take_received()
        short.serving_feed(self._handle, ahead, len(ahead))

    def receive(self) -> Frame:
        """The next request that C++ does not answer, or that must not be answered, because the key is not valid any
        more. Raises as `Channel.receive` does.
        """
        data, size = ctypes.c_void_p(), ctypes.c_int64()
        waiting, problem = self._functions.of_batches.serving_next, _UNCHECKED
        while problem == _UNCHECKED:
            problem = waiting(self._handle, self._valid_at, ctypes.byref(data), ctypes.byref(size))
            if problem == _UNCHECKED:
                self._valid_at = self._version.value  # before the check
                problem = _UNCHECKED if self._is_valid() else 0
        if problem == errno.ECONNRESET:
            raise ConnectionResetError("the other side closed the connection")
        if problem:
            raise OSError(problem, os.strerror(problem))
        assert data.value is not None
        self._channel.feed(ctypes.string_at(data.value, size.value))
        return self._channel.receive()

    def has_frame(self) -> bool:
        """Whether another request is here."""
        return bool(self._functions.short.serving_has_frame(self._handle))

    def use_arena(self, arena: SharedMemory | None) -> None:
        """The session's staging area."""
        address, size = (address_of(arena.data), arena.size) if arena is not None else (None, 0)
        self._functions.short.serving_use_arena(self._handle, address, size)

    def close(self) -> None:
        """Ends the session's pins."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._functions.of_batches.serving_close(handle)
