"""Bytes of blocks pass through a socket unchanged, in pieces of any size, and no end waits for ever."""

import random
import select
import socket
import threading
import time

import numpy as np
import pytest
import xxhash

from ems.common.channel import Channel
from kvloom.pool.cluster.block_stream import receive_summed, send_blocks
from kvloom.pool.storage.passing import Spans
from tests.support.pool.node_proxy import tcp_pair
from tests.support.waiting import WAIT_S, until

pytestmark = pytest.mark.usefixtures("either_kind")


def soon() -> float:
    return time.monotonic() + WAIT_S


@pytest.mark.parametrize("sizes", [[1], [100, 300_000, 1], [20_000] * 70, [0, 5, 0, 700_000, 0]])
def test_bytes_come_as_they_were_sent_whatever_pieces_they_come_in(sizes):
    near, far = tcp_pair()
    draw = random.Random(len(sizes))
    blocks = [np.frombuffer(draw.randbytes(size), np.uint8) for size in sizes]
    targets = [np.zeros(size, np.uint8) if number % 3 != 1 else None for number, size in enumerate(sizes)]

    def send() -> None:
        send_blocks(Channel(far), Spans.of(blocks, sizes), soon())
        data, position = b"".join(map(bytes, blocks)), 0
        while position < len(data):
            count = draw.randrange(1, 70_000)
            far.sendall(data[position : position + count])
            position += count

    with near, far:
        thread = threading.Thread(target=send)
        thread.start()
        for _ in range(2):
            sums = receive_summed(Channel(near), Spans.of(targets, sizes), soon())
            for block, target, found in zip(blocks, targets, sums, strict=True):
                assert target is None or (target == block).all()
                assert target is None or len(target) == 0 or found.tobytes() == xxhash.xxh3_128_digest(block)
        thread.join()


def test_behind_blocks_a_single_byte_is_enough_to_be_woken():
    near, far = tcp_pair()
    size = 3 << 20
    target = np.zeros(size, np.uint8)

    def send() -> None:
        far.sendall(bytes(size // 2))

    with near, far:
        thread = threading.Thread(target=send)
        thread.start()
        with pytest.raises(TimeoutError):  # so it waits, whatever the two threads do first
            receive_summed(Channel(near), Spans.of([target], [size]), time.monotonic() + 0.2)
        thread.join()
        assert near.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
        while select.select([near], [], [], 0)[0]:
            near.recv(size)
        far.sendall(b"x")
        assert select.select([near], [], [], WAIT_S)[0]


def test_the_last_bytes_of_blocks_are_not_waited_for_in_vain():
    near, far = tcp_pair()
    size = 300_000
    target = np.zeros(size, np.uint8)
    data = random.Random(1).randbytes(size)
    sums: list[bytes] = []

    def receive() -> None:
        sums.append(receive_summed(Channel(near), Spans.of([target], [size]), soon()).tobytes())

    with near, far:
        thread = threading.Thread(target=receive)
        thread.start()
        far.sendall(data[:-1])
        until(lambda: target[:-1].tobytes() == data[:-1])  # so the receiver waits for the last byte alone
        far.sendall(data[-1:])
        thread.join(WAIT_S)
        assert sums == [xxhash.xxh3_128_digest(data)]


def test_who_sends_waits_no_longer_than_it_may():
    near, far = tcp_pair()
    blocks = Spans.of([np.zeros(1 << 20, np.uint8)] * 64, [1 << 20] * 64)
    with near, far:
        with pytest.raises(TimeoutError):
            send_blocks(Channel(near), blocks, time.monotonic() + 0.1)
        far.close()
        with pytest.raises(ConnectionError):
            send_blocks(Channel(near), blocks, soon())
