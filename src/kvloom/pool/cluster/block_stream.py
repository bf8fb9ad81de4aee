"""Bytes of a batch of blocks between a channel and the pool's memory: in C++ where the library is, else in Python.

Inside TLS the bytes come record by record through Python's `ssl`; their sums are C++'s.
"""

import errno
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from ems.common.channel import Channel
from ems.runs import address_of
from ems.wire.messages import SUM_BYTES
from kvloom.pool.cluster.native.library import CLOSED, Functions, functions
from kvloom.pool.cluster.tls_channel import TlsChannel
from kvloom.pool.storage.segments import Bytes

_UNWANTED_BYTES = 64 << 10  # of bytes that nobody wants, at a time
_FOR_EVER_NS = 2**63 - 1


def receive_summed(
    channel: Channel, targets: Sequence[Bytes | None], lengths: Sequence[int], deadline_s: float
) -> list[bytes]:
    """Fills memory with raw block bytes, block by block; the sums of what came.

    None instead of memory: those bytes come and are dropped; what stands in place of their sum is no sum of theirs.
    Raises as the channel does; then nobody knows what the memory holds.
    """
    native = functions()
    if native is None or isinstance(channel, TlsChannel):
        return [_receive_one(channel, *each, deadline_s, native) for each in zip(targets, lengths, strict=True)]
    sums = np.zeros((len(targets), SUM_BYTES), np.uint8)
    pieces = _pieces(targets, lengths)
    _check(
        native.library.stream_receive(
            channel.sock.fileno(), native.xxh3, address_of(pieces), len(pieces), _ns(deadline_s), address_of(sums)
        )
    )
    return [row.tobytes() for row in sums]


def send_blocks(channel: Channel, blocks: Sequence[Bytes], deadline_s: float) -> None:
    """Sends raw block bytes, block by block. Raises as the channel does."""
    native = functions()
    if native is None or isinstance(channel, TlsChannel):
        for block in blocks:
            channel.send_bytes(block.data, deadline_s)
        return
    pieces = _pieces(blocks, list(map(len, blocks)))
    _check(native.library.stream_send(channel.sock.fileno(), address_of(pieces), len(pieces), _ns(deadline_s)))


def _pieces(memories: Sequence[Bytes | None], lengths: Sequence[int]) -> npt.NDArray[np.uint64]:
    """Address, 0 for None, and bytes of each: [pieces, 2]."""
    rows = [(0 if memory is None else address_of(memory), n) for memory, n in zip(memories, lengths, strict=True)]
    return np.array(rows, np.uint64).reshape(-1, 2)


def _ns(deadline_s: float) -> int:
    return min(_FOR_EVER_NS, int(deadline_s * 1e9))


def _check(problem: int) -> None:
    """Raises what the channel would."""
    if problem == CLOSED:
        raise ConnectionResetError("the other side closed the connection")
    if problem == errno.ETIMEDOUT:
        raise TimeoutError("deadline passed")
    if problem:
        raise OSError(problem, os.strerror(problem))


def _receive_one(
    channel: Channel, target: Bytes | None, length: int, deadline_s: float, native: Functions | None
) -> bytes:
    if target is None:
        _drop(channel, length, deadline_s)
        return b""
    channel.receive_into(target.data, deadline_s)
    if native is None:
        return xxhash.xxh3_128_digest(target.data)
    out = np.empty(SUM_BYTES, np.uint8)
    native.library.stream_sum(native.xxh3, address_of(target), length, address_of(out))
    return out.tobytes()


def _drop(channel: Channel, length: int, deadline_s: float) -> None:
    """Reads bytes that nobody wants."""
    room = memoryview(bytearray(min(length, _UNWANTED_BYTES)))
    while length:
        count = min(length, len(room))
        channel.receive_into(room[:count], deadline_s)
        length -= count
