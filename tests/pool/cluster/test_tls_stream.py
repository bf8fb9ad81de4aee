"""Frames and blocks inside TLS: they pass unchanged, in pieces of any size; what is damaged or cut off is an error."""

import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
import pytest
import xxhash

from ems.wire import messages as m
from kvloom.pool.cluster.block_stream import receive_summed, send_blocks
from kvloom.pool.cluster.secured import TlsBroken
from kvloom.pool.cluster.tls_channel import NodeTls, TlsChannel
from kvloom.pool.storage.passing import Spans
from tests.support.pool.node_proxy import tcp_pair
from tests.support.pool.node_tls import NodeFiles
from tests.support.waiting import WAIT_S, soon, until

pytestmark = pytest.mark.usefixtures("either_kind")
RECORD = 16 << 10  # plain text of a full record


class Wire:
    """The bytes from `far` on their way to `near`: `change` may hold them back or damage them."""

    def __init__(self, change: Callable[[bytes], Iterator[bytes]]) -> None:
        self._near, near = tcp_pair()
        far, self._far = tcp_pair()
        self._change = change
        self.ends = near, far
        self._threads = [threading.Thread(target=run) for run in (self._forth, self._back)]
        for thread in self._threads:
            thread.start()

    def _forth(self) -> None:
        with suppress(OSError):  # an end that was aborted may answer with a reset
            while data := self._far.recv(1 << 16):
                for piece in self._change(data):
                    self._near.sendall(piece)
        with suppress(OSError):
            self._near.shutdown(socket.SHUT_WR)

    def _back(self) -> None:
        with suppress(OSError):
            while data := self._near.recv(1 << 16):
                self._far.sendall(data)

    def close(self) -> None:
        for sock in (*self.ends, self._near, self._far):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join()


def unchanged(data: bytes) -> Iterator[bytes]:
    yield data


@contextmanager
def shaken(tmp_path, change: Callable[[bytes], Iterator[bytes]] = unchanged) -> Iterator[tuple[TlsChannel, TlsChannel]]:
    """Two ends of a connection that have shaken hands; what the second one sends passes through `change`."""
    files, wire = NodeFiles(tmp_path), Wire(change)
    near = NodeTls(files.config("a")).channel(wire.ends[0], is_server=True)
    far = NodeTls(files.config("b")).channel(wire.ends[1], is_server=False)
    try:
        thread = threading.Thread(target=near.handshake, args=(soon(),))
        thread.start()
        far.handshake(soon())
        thread.join()
        yield near, far
    finally:
        for channel in (near, far):
            channel.abort()
        wire.close()


def drawn(sizes: list[int]) -> list[np.ndarray]:
    draw = random.Random(len(sizes))
    return [np.frombuffer(draw.randbytes(size), np.uint8) for size in sizes]


@pytest.mark.parametrize("sizes", [[1], [100, 300_000, 1], [20_000] * 70, [0, 5, 0, 700_000, 0], [RECORD, RECORD + 1]])
def test_frames_and_blocks_take_turns_and_come_as_they_were_sent(tmp_path, sizes):
    blocks = drawn(sizes)
    targets = [np.zeros(size, np.uint8) if number % 3 != 1 else None for number, size in enumerate(sizes)]
    draw = random.Random(2)

    def pieces(data: bytes) -> Iterator[bytes]:
        while data:
            count = draw.randrange(1, 30_000)
            yield data[:count]
            data = data[count:]

    with shaken(tmp_path, pieces) as (near, far):

        def send() -> None:
            for _ in range(2):
                far.send(m.Ping(), soon())
                send_blocks(far, Spans.of(blocks, sizes), soon())
            for block in blocks:
                far.send_bytes(block.data, soon())
            far.send(m.Ping(), soon())

        thread = threading.Thread(target=send)
        thread.start()
        for turn in range(3):
            if turn < 2:
                assert near.receive(soon()).message == m.Ping()
            sums = receive_summed(near, Spans.of(targets, sizes), soon())
            for block, target, found in zip(blocks, targets, sums, strict=True):
                assert target is None or (target == block).all()
                assert target is None or len(target) == 0 or found.tobytes() == xxhash.xxh3_128_digest(block)
        assert near.receive(soon()).message == m.Ping()
        thread.join()
        near.send(m.Ping(), soon())
        until(far.has_frame)
        assert far.receive(soon()).message == m.Ping()
        assert not far.has_frame()


def test_the_end_of_a_record_is_not_waited_for_in_vain(tmp_path):
    """The receiver has all but the last byte of the last record, so less is to come than it wants of the block."""
    size = 18 * RECORD + 5000
    (block,), target = drawn([size]), np.zeros(size, np.uint8)
    is_whole, may_end = threading.Event(), threading.Event()

    def but_the_last(data: bytes) -> Iterator[bytes]:
        if not is_whole.is_set():
            yield data
            return
        held.append(data)
        if sum(map(len, held)) < size:
            return
        last = b"".join(held)
        held.clear()
        yield last[:-1]
        assert may_end.wait(WAIT_S)
        yield last[-1:]

    held: list[bytes] = []
    with shaken(tmp_path, but_the_last) as (near, far):
        far.send(m.Ping(), soon())
        near.receive(soon())
        is_whole.set()
        sending = threading.Thread(target=send_blocks, args=(far, Spans.of([block], [size]), soon()))
        sums: list[bytes] = []

        def receive() -> None:
            sums.append(receive_summed(near, Spans.of([target], [size]), soon()).tobytes())

        receiving = threading.Thread(target=receive)
        sending.start()
        receiving.start()
        until(lambda: (target[: 18 * RECORD] == block[: 18 * RECORD]).all())
        may_end.set()
        receiving.join()
        sending.join()
        assert sums == [xxhash.xxh3_128_digest(block)]


@pytest.mark.parametrize("at", [3, 40_000, 290_000])
def test_a_changed_bit_is_an_error(tmp_path, at):
    (block,), position = drawn([300_000]), -(1 << 40)

    def flip(data: bytes) -> Iterator[bytes]:
        nonlocal position
        changed = bytearray(data)
        if 0 <= at - position < len(data):
            changed[at - position] ^= 4
        position += len(data)
        yield bytes(changed)

    with shaken(tmp_path, flip) as (near, far):
        far.send(m.Ping(), soon())
        near.receive(soon())
        position = 0

        def send() -> None:
            with suppress(ConnectionError):  # the receiver may have hung up already
                far.send_bytes(block.data, soon())

        thread = threading.Thread(target=send)
        thread.start()
        with pytest.raises(TlsBroken):
            receive_summed(near, Spans.of([np.zeros(300_000, np.uint8)], [300_000]), soon())
        thread.join()


def test_blocks_that_end_early_are_an_error(tmp_path):
    (block,) = drawn([300_000])
    with shaken(tmp_path) as (near, far):
        far.send_bytes(block.data, soon())
        far.abort()
        with pytest.raises(ConnectionError):
            receive_summed(near, Spans.of([np.zeros(300_001, np.uint8)], [300_001]), soon())


def test_no_end_waits_longer_than_it_may(tmp_path):
    blocks = Spans.of([np.zeros(1 << 20, np.uint8)] * 64, [1 << 20] * 64)
    is_stalled = threading.Event()

    def stall(data: bytes) -> Iterator[bytes]:
        if is_stalled.is_set():
            go_on.wait(WAIT_S)
        yield data

    go_on = threading.Event()
    with shaken(tmp_path, stall) as (near, far):
        is_stalled.set()
        try:
            with pytest.raises(TimeoutError):
                send_blocks(far, blocks, soon_but_short())
            with pytest.raises(TimeoutError):
                receive_summed(near, blocks, soon_but_short())
            with pytest.raises(TimeoutError):
                near.receive(soon_but_short())
        finally:
            go_on.set()


def soon_but_short() -> float:
    return soon() - WAIT_S + 0.1
