"""`python -m tests.support.pool.storm`: threads save, read, evict and release in one native pool, and send to others.

Runs under a sanitizer. Exits with 1 when a byte is wrong or the pool's invariants do not hold.
"""

import random
import socket
import sys
import threading
import time

import numpy as np

from ems.common.channel import Channel
from ems.native.tensors import native_tensors
from ems.runs import Areas, Blocks
from ems.tensors import as_tensor
from kvloom.pool.cluster.arrivals import receive_blocks
from kvloom.pool.cluster.block_stream import receive_summed, send_blocks
from kvloom.pool.cluster.native.library import functions
from kvloom.pool.storage.budget import Budget
from kvloom.pool.storage.entries import Geometry
from kvloom.pool.storage.native.pool import NativePool
from kvloom.pool.storage.opening import PoolOptions, open_pool
from kvloom.pool.storage.passing import UNSOUND, Announced, Spans
from kvloom.pool.storage.pool import Batch
from tests.support.pool.sessions import Sessions

SLAB, TOTAL, THREADS, ROUNDS = 1 << 16, 1 << 19, 3, 60
SIZES = (5000, 20000, 40000)  # the largest are checksummed in pieces


class Storm:
    """One pool, and the errors of its threads."""

    def __init__(self) -> None:
        self.budget = Budget(TOTAL)
        self.budget.set_limits("t", 0, TOTAL)
        self.pool = open_pool("t", PoolOptions(self.budget, Geometry(1 << 17, SLAB), 0.25, "s3fifo"))
        assert isinstance(self.pool, NativePool), "there is no library"
        self.errors: list[BaseException] = []

    def send(self, sock: socket.socket) -> None:
        """Sends pinned blocks while others save and evict, with their expected bytes; at the end an empty list."""
        try:
            with sock:
                draw, channel = random.Random(9), Channel(sock)
                for _ in range(ROUNDS):
                    keys = [_key(draw) for _ in range(9)]
                    offered = self.pool.offer(keys)
                    lengths = offered.lengths
                    told = np.array([*lengths, *(key[3] for key in keys)], np.int64).view(np.uint8)
                    send_blocks(channel, Spans.of([told], [len(told)]), _soon())
                    send_blocks(channel, Spans.of([np.frombuffer(offered.sums, np.uint8)], [9 * 16]), _soon())
                    send_blocks(channel, offered.spans, _soon())
                    offered.release()
        except BaseException as error:
            self.errors.append(error)

    def receive(self, sock: socket.socket) -> None:
        """Receives from `send` and stores the blocks under new keys in the pool, if there is room."""
        try:
            with sock:
                channel = Channel(sock)
                for turn in range(ROUNDS):
                    told, sums = self.some(channel, 18 * 8).view(np.int64), self.some(channel, 9 * 16).reshape(9, 16)
                    here = [i for i in range(9) if told[i]]
                    keys = [bytes([100 + turn, 0, 0, told[9 + i], i]) + bytes(27) for i in here]
                    announced = [sums[i].tobytes() for i in here]
                    if turn % 5 == 0 and announced:
                        announced[0] = bytes(16)
                    self.arrive(channel, Announced(keys, [int(told[i]) for i in here], b"".join(announced)))
        except BaseException as error:
            self.errors.append(error)

    def arrive(self, channel: Channel, blocks: Announced) -> None:
        is_damaged = blocks.sums[:16] == bytes(16)
        for statuses, held, _lengths in receive_blocks(channel, self.pool, blocks, _soon()):
            assert is_damaged or UNSOUND not in statuses, "a wrong sum"
            for block in held.blocks():
                assert (self.pool.view(block.offset, block.length) == block.key[3]).all(), "wrong bytes"
            held.release()

    @staticmethod
    def some(channel: Channel, count: int) -> np.ndarray:
        memory = np.empty(count, np.uint8)
        receive_summed(channel, Spans.of([memory], [count]), _soon())
        return memory

    def run(self, seed: int) -> None:
        """One thread's calls."""
        try:
            draw = random.Random(seed)
            cache = as_tensor("t", np.random.default_rng(seed).integers(0, 256, (8, 1, 1, 40000), np.uint8))
            assert cache is not None
            moving = native_tensors([cache], [0])
            assert moving is not None
            for _ in range(ROUNDS):
                self.turn(draw, moving)
        except BaseException as error:
            self.errors.append(error)

    def turn(self, draw, moving) -> None:
        size, count = draw.choice(SIZES), draw.randint(1, 8)
        keys = [_key(draw) for _ in range(count)]
        arena = np.zeros(count * size, np.uint8)
        areas = Areas({0: arena}, [0] * count, [i * size for i in range(count)], [size] * count)
        moving.gather(
            Blocks.of([(((i, 0, 1),),) for i in range(count)]),
            Areas(
                {0: np.empty(count * 40000, np.uint8)}, [0] * count, [i * 40000 for i in range(count)], [40000] * count
            ),
        )
        for i, key in enumerate(keys):
            arena[i * size : (i + 1) * size] = key[3]
        self.pool.save(Batch(keys, areas, b"", [draw.random() < 0.2] * count)).held.release()
        held = self.pool.hold_prefix(keys)
        located = held.located()
        for key, segment, offset, length in zip(keys, located.segments, located.offsets, located.lengths, strict=False):
            view = self.pool.view(segment * (1 << 17) + offset, length)
            assert (view == key[3]).all(), "wrong bytes"
        held.release()
        chance = draw.random()
        if chance < 0.05:
            self.pool.shrink(1)
        elif chance < 0.1:
            self.pool.evict(draw.randint(1, TOTAL // 4))
        elif chance < 0.3:
            self.pool.make_room_ahead(8192, 4)
        elif chance < 0.5:
            self.pool.unpin([block for block in self.pool.pin_each(keys) if block is not None])


def _key(draw: random.Random) -> bytes:
    return draw.randint(0, 60).to_bytes(4, "big") * 8


def _soon() -> float:
    return time.monotonic() + 60


def main() -> int:
    assert functions() is not None, "there is no library"
    storm, (here, there) = Storm(), socket.socketpair()
    threads = [threading.Thread(target=storm.run, args=(seed,)) for seed in range(THREADS)]
    threads += [
        threading.Thread(target=storm.send, args=(here,)),
        threading.Thread(target=storm.receive, args=(there,)),
    ]
    sessions = Sessions(storm.pool, storm.errors)
    threads += [threading.Thread(target=sessions.run, args=(seed,)) for seed in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    storm.pool.check()
    for error in storm.errors:
        print(repr(error), file=sys.stderr)
    return bool(storm.errors)


if __name__ == "__main__":
    sys.exit(main())
