"""Sessions of a pool storm: the SDK's calls in C++ over a socket, answered in C++ by one native pool."""

import ctypes
import random
import socket
import threading
import time

import numpy as np

from ems.common.channel import Channel
from ems.native.calls import PARTLY, How, NativeCalls, Sizes
from ems.native.functions import Segment, functions
from ems.native.line import Mapped, NativeLine, WantedLoad, WantedSave, native_line
from ems.native.plan import native_planner
from ems.native.tensors import NativeHostTensors, native_tensors
from ems.runs import Blocks, Bytes, address_of
from ems.tensors import as_tensor
from ems.wire import messages as m
from kvloom.pool.storage.native.pool import NativePool
from kvloom.pool.storage.pool import Terms
from kvloom.pool.storage.segments import SharedMemory

ROUNDS, SIZES = 60, (5000, 20000, 40000)


class Sessions:
    """Clients that save and load through the library's own calls, served from the storm's pool."""

    def __init__(self, pool: NativePool, errors: list[BaseException]) -> None:
        """errors: receives the errors."""
        self.pool = pool
        self.errors = errors

    def serve(self, sock: socket.socket, arena: SharedMemory, board: Bytes | None) -> None:
        terms = Terms(keyring_version=ctypes.c_uint64(), is_direct=True, board=board)
        channel = Channel(sock)
        serving = self.pool.serving(channel, terms)
        serving.use_arena(arena)
        try:
            while True:  # Python handles the first request, which checks the session's key
                serving.receive()
                channel.send(m.Done())
        except ConnectionError:
            serving.close()
        except BaseException as error:
            self.errors.append(error)

    def run(self, seed: int) -> None:
        assert functions() is not None, "there is no library"
        here, there = socket.socketpair()
        arena = SharedMemory("storm", 1 << 18, False)
        board = np.zeros(m.BOARD_BYTES, np.uint8) if seed % 2 else None
        served = threading.Thread(target=self.serve, args=(there, arena, board))
        served.start()
        try:
            channel, line = Channel(here), native_line(here.fileno(), board)
            assert line is not None
            channel.send(m.Ping())
            channel.receive(None)
            for number in range(ROUNDS):
                draw = random.Random(seed * ROUNDS + number)
                self.turn(line, arena, draw)
                self.call(line, arena, draw)
        except BaseException as error:
            self.errors.append(error)
        here.close()
        served.join()
        arena.close()

    def turn(self, line: NativeLine, arena: SharedMemory, draw: random.Random) -> None:
        size, count, deadline_s = draw.choice(SIZES), draw.randint(1, 8), time.monotonic() + 60
        keys = [draw.randint(0, 60).to_bytes(4, "big") * 8 for _ in range(count)]
        source = np.empty((count, 1, 1, size), np.uint8)
        for block, key in zip(source, keys, strict=True):
            block[:] = key[3]
        moving = _tensors(source)
        blocks, sizes = Blocks.of([(((i, 0, 1),),) for i in range(count)]), np.full(count, size)
        named = b"".join(keys)
        plan = moving.plan_of(blocks, named, sizes)
        staged = WantedSave(plan, count, b"", arena.data, 1 << 16, 4, 1 << 14, True)
        save = (staged if draw.random() < 0.5 else WantedSave(plan, count, b"")).call()
        line.save(save, self.maps, deadline_s)
        assert 0 < save.num_done <= count
        assert 0 <= save.num_local <= save.num_success <= save.num_done
        assert save.done_bytes == save.num_done * size
        assert (save.problem < 0) == (save.num_success == save.num_done)
        assert line.exists(named, False, deadline_s) <= count
        source[:] = 0
        wanted = WantedLoad(plan, 0, count, False)
        loaded = line.load(wanted, self.maps, deadline_s)
        for block, key in zip(source[: loaded.num_done], keys, strict=False):
            assert (block == key[3]).all(), "wrong bytes"

    def call(self, line: NativeLine, arena: SharedMemory, draw: random.Random) -> None:
        """The same calls, each in one step, from lists."""
        size, count = draw.choice(SIZES), draw.randint(1, 8)
        hashes = draw.sample(range(200), count)
        source = np.empty((count, 1, 1, size), np.uint8)
        source[:] = np.array(hashes, np.uint8)[:, None, None, None]
        planner = native_planner(_tensors(source), (1, count), b"storm")
        assert planner is not None
        calls = NativeCalls(line, planner, Sizes(1 << 16, 1 << 16, 4, 1 << 14, draw.random() < 0.5))
        given, how = (list(range(count)), hashes, [1] * count), How(time.monotonic_ns() + 60 * 10**9, 0, 1)
        problem = calls.save(given, how, self.maps(None, 0), (arena.data, 1 << 18))
        line.finish_save(calls.last.save, 0 if problem == PARTLY else problem, self.maps)
        saved = calls.last.save
        assert saved.num_done == count or saved.problem >= 0
        assert (saved.problem < 0) == (saved.num_success == count)
        assert calls.exists(hashes, how) == 0
        assert calls.last.count <= count
        source[:] = 255
        loaded = line.finish(calls.last.load, calls.load(given, how, self.maps(None, 0)), self.maps)
        for block, number in zip(source[: loaded.num_done], hashes, strict=False):
            assert (block == number).all(), "wrong bytes"
        assert (source[loaded.num_done :] == 255).all()

    def maps(self, numbers: list[int] | None, num_given_back: int) -> Mapped:
        """The pool is in this process: nothing has to be mapped."""
        memories = [(n, self.pool.view(n * (1 << 17), 1 << 17)) for n in set(numbers or [])]
        table = (Segment * len(memories))(*((n, address_of(memory), len(memory)) for n, memory in memories))
        return Mapped(table, [memory for _number, memory in memories], num_given_back)


def _tensors(source: np.ndarray) -> NativeHostTensors:
    cache = as_tensor("t", source)
    assert cache is not None
    moving = native_tensors([cache], [0])
    assert moving is not None
    return moving
