"""Bytes of a batch of blocks between a channel and the pool's memory, in C++ if the library is available, else in
Python.
"""

import errno
import os

import numpy as np
import xxhash

from ems.common.channel import Channel
from ems.runs import address_of
from ems.wire.messages import SUM_BYTES
from kvloom.pool.cluster.native.library import BROKEN, CLOSED, TlsEnds, functions
from kvloom.pool.cluster.secured import SecuredChannel, TlsBroken
from kvloom.pool.storage.passing import Spans, Sums

_UNWANTED_BYTES = 64 << 10  # bytes that are read at a time in order to drop them
_FOR_EVER_NS = 2**63 - 1


def receive_summed(channel: Channel, spans: Spans, deadline_s: float) -> Sums:
    """Fill memory with raw block bytes, block by block. Returns their checksums.

    Bytes without memory are read and dropped; their checksum is undefined. Raises as the channel does; then the
    contents of the memory are undefined.
    """
    native, rows, sums = functions(), spans.rows, np.zeros((len(spans.rows), SUM_BYTES), np.uint8)
    if native is None:
        for i, (view, length) in enumerate(zip(spans.views(), spans.lengths, strict=True)):
            if view is None:
                _drop(channel, length, deadline_s)
            else:
                channel.receive_into(view.data, deadline_s)
                sums[i] = np.frombuffer(xxhash.xxh3_128_digest(view.data), np.uint8)
        return sums
    problem = native.library.stream_receive(
        channel.sock.fileno(),
        _ends(channel),
        native.xxh3,
        address_of(rows),
        len(rows),
        _ns(deadline_s),
        address_of(sums),
    )
    _check(problem)
    return sums


def send_blocks(channel: Channel, spans: Spans, deadline_s: float) -> None:
    """Sends raw block bytes, block by block. Raises as the channel does."""
    native, rows = functions(), spans.rows
    if native is None:
        for view in spans.views():
            if view is not None:
                channel.send_bytes(view.data, deadline_s)
        return
    how = channel.sock.fileno(), _ends(channel)
    _check(native.library.stream_send(*how, address_of(rows), len(rows), _ns(deadline_s)))


def _ends(channel: Channel) -> TlsEnds | None:
    return channel.ends if isinstance(channel, SecuredChannel) else None


def _ns(deadline_s: float) -> int:
    return min(_FOR_EVER_NS, int(deadline_s * 1e9))


def _check(problem: int) -> None:
    """Raises the error that the channel would raise."""
    if problem == CLOSED:
        raise ConnectionResetError("the other side closed the connection")
    if problem == BROKEN:
        raise TlsBroken("what came is not what was sent")
    if problem == errno.ETIMEDOUT:
        raise TimeoutError("deadline passed")
    if problem:
        raise OSError(problem, os.strerror(problem))


def _drop(channel: Channel, length: int, deadline_s: float) -> None:
    """Read bytes and drop them."""
    room = memoryview(bytearray(min(length, _UNWANTED_BYTES)))
    while length:
        count = min(length, len(room))
        channel.receive_into(room[:count], deadline_s)
        length -= count
