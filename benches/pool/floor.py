"""The least that two processes need for a batch: messages, copies and checksums in C++ (floor.cpp), nothing else.

`python -m benches.pool.floor`: GB/s of saves and loads, a batch each in turn, of two processes that only copy and
checksum, each in its own memory, larger than the caches: what many clients and their agent could reach here.
"""

import ctypes
import json
import mmap
import multiprocessing
import os
import socket
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ems.native.build import Library
from ems.native.library import xxh3
from ems.runs import address_of

Bytes = npt.NDArray[np.uint8]
_FLOOR = Library("libfloor", Path(__file__).parent)
_FIRST_BYTES = 128 << 10  # of a message, at least
_MESSAGES = 8  # a batch


class Floor:
    """A process that answers, and this one. Batches of `num` blocks use the slots of a pool in turn."""

    def __init__(self, block_bytes: int, num: int, pool_bytes: int) -> None:
        self._library = ctypes.CDLL(str(_FLOOR.path()))
        functions = xxh3()
        assert functions is not None, "there is no xxhash to call"
        self._xxh3 = ctypes.byref(functions)
        total = block_bytes * num
        self._arena = np.frombuffer(mmap.mmap(-1, total), np.uint8)
        self._pool = np.frombuffer(mmap.mmap(-1, pool_bytes), np.uint8)
        self._num, self._num_batches = num, pool_bytes // total
        self._turn = 0
        self._block_bytes = block_bytes
        self._at_once = max(1, _FIRST_BYTES // block_bytes, num // _MESSAGES)
        self._sock, there = socket.socketpair()
        self._child = os.fork()
        if self._child == 0:
            self._sock.close()
            self._touch()
            self._library.floor_serve(there.fileno(), self._xxh3, *self._addresses(), self._of(block_bytes))
            os._exit(0)
        there.close()
        self._touch()

    def _touch(self) -> None:
        """Touch every page in this process."""
        for memory in (self._arena, self._pool):
            memory[:: mmap.PAGESIZE] = 1

    @staticmethod
    def _of(number: int) -> ctypes.c_int64:
        return ctypes.c_int64(number)

    def _addresses(self) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        return ctypes.c_void_p(address_of(self._arena)), ctypes.c_void_p(address_of(self._pool))

    def save(self, source: Bytes) -> None:
        """Save a batch to the next slot in the pool, in turn."""
        self._turn = (self._turn + 1) % self._num_batches
        numbers = (self._block_bytes, self._num, self._at_once, self._turn * self._num)
        arena, _pool = self._addresses()
        address = ctypes.c_void_p(address_of(source))
        self._library.floor_save(self._sock.fileno(), address, arena, *map(self._of, numbers))

    def load(self, target: Bytes, num: int) -> None:
        """Load `num` blocks of the batch that was saved last; 0: only a message and its answer."""
        numbers = (self._block_bytes, num, self._turn * self._num)
        _arena, pool = self._addresses()
        address = ctypes.c_void_p(address_of(target))
        self._library.floor_load(self._sock.fileno(), self._xxh3, pool, address, *map(self._of, numbers))

    def close(self) -> None:
        """End the other process."""
        self._sock.close()
        os.waitpid(self._child, 0)


_MIXED_BYTES = 128 << 20  # the size of source, pool and target, in each process
_BATCH, _BLOCK_BYTES, _TURNS = 64, 64 << 10, 200


def _mix(_number: int) -> tuple[float, float]:
    """Wall seconds and processor seconds of all turns."""
    library, functions = ctypes.CDLL(str(_FLOOR.path())), xxh3()
    assert functions is not None, "there is no xxhash to call"
    memories = [np.ones(_MIXED_BYTES, np.uint8) for _ in range(3)]
    source, pool, target = map(address_of, memories)
    batch = _BATCH * _BLOCK_BYTES
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    for turn in range(_TURNS):
        at, other = turn * batch % _MIXED_BYTES, (turn * batch + _MIXED_BYTES // 2) % _MIXED_BYTES
        addresses = [ctypes.c_void_p(each) for each in (source + at, pool + at, pool + other, target + other)]
        library.floor_mixed(ctypes.byref(functions), *addresses, ctypes.c_int64(_BLOCK_BYTES), ctypes.c_int64(_BATCH))
    return time.perf_counter() - wall_s, time.process_time() - cpu_s


def mixed(num_processes: int = 2) -> dict[str, float]:
    """GB/s of all processes together, and GB that a second of one processor moves."""
    with multiprocessing.get_context("fork").Pool(num_processes) as pool:
        took = pool.map(_mix, range(num_processes), chunksize=1)
    moved = 2 * _TURNS * _BATCH * _BLOCK_BYTES / 1e9
    return {
        "save_and_load": round(num_processes * moved / max(wall_s for wall_s, _cpu_s in took), 2),
        "gb_a_processor_s": round(num_processes * moved / sum(cpu_s for _wall_s, cpu_s in took), 2),
    }


if __name__ == "__main__":
    print(json.dumps({"bench": "pool_floor", "block_bytes": _BLOCK_BYTES, **mixed()}))
