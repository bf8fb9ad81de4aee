"""Memory of freed blocks is returned to the system, no other memory is, and it is mapped again before use."""

import ctypes
import mmap
import os
import threading

import numpy as np
import pytest

from kvloom.contract.capacity import Ahead
from kvloom.rank import pages as pages_module
from kvloom.rank.pages import PagesAhead, release_blocks
from tests.support.waiting import until

NUM_BLOCKS, BLOCK_BYTES = 64, mmap.PAGESIZE * 3 // 2
BLOCKS = [*range(8, 32), 40, *range(50, NUM_BLOCKS)]


LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def resident_bytes(layers: list[list[np.ndarray]]) -> int:
    """Resident bytes of these tensors alone, whose blocks are whole pages; other memory of the process varies."""
    total = 0
    for block in (block for layer in layers for side in layer for block in side):
        pages = np.zeros(block.nbytes // mmap.PAGESIZE, np.uint8)
        assert LIBC.mincore(block.ctypes.data, block.nbytes, pages.ctypes.data) == 0
        total += int((pages & 1).sum()) * mmap.PAGESIZE
    return total


@pytest.mark.parametrize("flags", [mmap.MAP_SHARED, mmap.MAP_PRIVATE], ids=["shared", "private"])
def test_whole_pages_of_the_blocks_are_released_and_all_others_keep_their_bytes(flags):
    pages = mmap.mmap(-1, NUM_BLOCKS * BLOCK_BYTES, flags=flags | mmap.MAP_ANONYMOUS)
    side = np.frombuffer(pages, dtype=np.uint8).reshape(NUM_BLOCKS, BLOCK_BYTES)
    side[:] = 7
    released = release_blocks([[side]], BLOCKS)
    kept = [block for block in range(NUM_BLOCKS) if block not in BLOCKS]
    assert (side[kept] == 7).all()
    assert int((side == 0).sum()) == released
    # each run of blocks loses at most one page at each end
    assert released >= len(BLOCKS) * BLOCK_BYTES - 2 * 3 * mmap.PAGESIZE
    assert released % mmap.PAGESIZE == 0


def test_of_tensors_whose_blocks_lie_between_each_others_only_the_blocks_are_released():
    """A block of all three tensors is contiguous, as in the CPU kernels."""
    pages = mmap.mmap(-1, NUM_BLOCKS * 3 * BLOCK_BYTES)
    cache = np.frombuffer(pages, dtype=np.uint8).reshape(NUM_BLOCKS, 3, BLOCK_BYTES)
    cache[:] = 7
    released = release_blocks([[cache[:, 1], cache[:, 0]], [cache[:, 2]]], BLOCKS)
    kept = [block for block in range(NUM_BLOCKS) if block not in BLOCKS]
    assert (cache[kept] == 7).all()
    assert int((cache == 0).sum()) == released
    assert released >= len(BLOCKS) * 3 * BLOCK_BYTES - 2 * 3 * mmap.PAGESIZE


def test_the_system_has_the_memory_back():
    num_bytes = 64 << 20
    pages = mmap.mmap(-1, num_bytes)
    side = np.frombuffer(pages, dtype=np.uint8).reshape(64, -1)
    side[:] = 1
    assert resident_bytes([[side]]) == num_bytes
    release_blocks([[side]], range(64))
    assert resident_bytes([[side]]) == 0


def new_layers(num_bytes: int) -> list[list[np.ndarray]]:
    """Two layers of two tensors of 64 blocks, not yet touched."""
    return [[np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8).reshape(64, -1) for _ in range(2)] for _ in range(2)]


def new_layers_together(num_bytes: int) -> list[list[np.ndarray]]:
    """The same layers, with a block of all four tensors contiguous."""
    cache = np.frombuffer(mmap.mmap(-1, 4 * num_bytes), np.uint8).reshape(64, 2, 2, -1)
    return [[cache[:, layer, side] for side in range(2)] for layer in range(2)]


@pytest.fixture
def no_way_given(monkeypatch):
    """Threads keep normal priority: beside busy processes, one of low priority may get no time for minutes."""
    monkeypatch.setattr(pages_module, "_NICENESS", os.getpriority(os.PRIO_PROCESS, 0))


def test_the_thread_gives_way_to_all_others():
    before = set(threading.enumerate())
    pages = PagesAhead(new_layers(1 << 20), 64, Ahead(1 << 20, 1 << 20, 1 << 20))
    (thread,) = set(threading.enumerate()) - before
    until(lambda: os.getpriority(os.PRIO_PROCESS, thread.native_id) == 19)
    assert pages.num_wanted == 16


@pytest.mark.usefixtures("no_way_given")
@pytest.mark.parametrize("new_layers", [new_layers, new_layers_together])
def test_memory_is_provided_ahead_of_the_highest_block_in_use_and_no_further(new_layers):
    layers = new_layers(4 << 20)  # 64 KiB per block, 256 KiB in all four tensors
    pages = PagesAhead(layers, 64, Ahead(2 << 20, 8 << 20, 0))
    until(lambda: resident_bytes(layers) == 2 << 20)
    pages.use(9)
    until(lambda: resident_bytes(layers) == 5 << 20)
    pages.use(3)
    assert pages.num_wanted == 10 + 10, "nothing for a block that lies before"
    pages.use(19)
    assert pages.num_wanted == 20 + 20, "as much as is in use"
    pages.use(50)
    assert pages.num_wanted == 64
    until(lambda: resident_bytes(layers) == 16 << 20)
    assert all((side == 0).all() for layer in layers for side in layer)


@pytest.mark.usefixtures("no_way_given")
def test_what_is_in_a_block_stays_when_its_memory_is_provided():
    layers = new_layers(1 << 20)
    layers[0][1][40] = 7
    PagesAhead(layers, 32, Ahead(1 << 30, 1 << 30, 0))  # each block of this cache is two of the tensors'
    until(lambda: resident_bytes(layers) == 4 << 20)
    assert (layers[0][1][40] == 7).all()


@pytest.mark.usefixtures("no_way_given")
def test_what_was_given_back_is_provided_again_from_the_first_block_on():
    layers = new_layers(4 << 20)
    pages = PagesAhead(layers, 64, Ahead(2 << 20, 2 << 20, 0))
    pages.use(30)
    until(lambda: 4 * resident_bytes(layers) == 39 << 20)
    release_blocks(layers, range(64))
    pages.forget()
    assert pages.num_wanted == 8
    until(lambda: resident_bytes(layers) == 2 << 20)
    pages.use(0)
    assert pages.num_wanted == 1 + 8


@pytest.fixture
def always_at_rest(monkeypatch, no_way_given):
    """Any pause counts as rest, so the thread provides memory further ahead at once."""
    monkeypatch.setattr(pages_module, "_REST_S", 0.0)


@pytest.mark.usefixtures("always_at_rest")
def test_at_rest_memory_is_provided_further_ahead_of_what_was_used():
    layers = new_layers(4 << 20)  # 256 KiB per block in all four tensors
    pages = PagesAhead(layers, 64, Ahead(1 << 20, 1 << 20, 4 << 20))
    until(lambda: resident_bytes(layers) == 4 << 20)
    pages.use(7)
    until(lambda: resident_bytes(layers) == 6 << 20)
    pages.use(3)
    pages.use(60)
    until(lambda: resident_bytes(layers) == 16 << 20)
    assert all((side == 0).all() for layer in layers for side in layer)


@pytest.mark.usefixtures("always_at_rest")
def test_at_rest_no_more_is_taken_than_a_quarter_of_what_is_left(monkeypatch):
    monkeypatch.setattr(pages_module, "available_bytes", lambda: 12 << 20)
    layers = new_layers(4 << 20)
    pages = PagesAhead(layers, 64, Ahead(1 << 20, 1 << 20, 16 << 20))
    until(lambda: resident_bytes(layers) == 4 << 20)
    assert pages.num_wanted == 4, "of what is wanted without rest"


@pytest.mark.usefixtures("always_at_rest")
def test_what_was_given_back_at_rest_is_not_taken_again_before_it_is_used():
    layers = new_layers(4 << 20)
    pages = PagesAhead(layers, 64, Ahead(1 << 20, 1 << 20, 8 << 20))
    until(lambda: resident_bytes(layers) == 8 << 20)
    release_blocks(layers, range(64))
    pages.forget()
    until(lambda: resident_bytes(layers) == 1 << 20 and pages._is_resting)
    pages.use(0)
    until(lambda: resident_bytes(layers) == (8 << 20) + (1 << 18))
