"""Blocks' memory goes back to the system, and only theirs."""

import mmap
from pathlib import Path

import numpy as np
import pytest

from kvloom.gewu.pages import release_blocks

NUM_BLOCKS, BLOCK_BYTES = 64, mmap.PAGESIZE * 3 // 2
BLOCKS = [*range(8, 32), 40, *range(50, NUM_BLOCKS)]


def resident_bytes() -> int:
    (line,) = [x for x in Path("/proc/self/smaps_rollup").read_text().splitlines() if x.startswith("Rss:")]
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize("flags", [mmap.MAP_SHARED, mmap.MAP_PRIVATE], ids=["shared", "private"])
def test_whole_pages_of_the_blocks_are_released_and_all_others_keep_their_bytes(flags):
    pages = mmap.mmap(-1, NUM_BLOCKS * BLOCK_BYTES, flags=flags | mmap.MAP_ANONYMOUS)
    side = np.frombuffer(pages, dtype=np.uint8).reshape(NUM_BLOCKS, BLOCK_BYTES)
    side[:] = 7
    released = release_blocks([[side]], BLOCKS)
    kept = [block for block in range(NUM_BLOCKS) if block not in BLOCKS]
    assert (side[kept] == 7).all()
    assert int((side == 0).sum()) == released
    # each run of blocks loses at most a page at each end
    assert released >= len(BLOCKS) * BLOCK_BYTES - 2 * 3 * mmap.PAGESIZE
    assert released % mmap.PAGESIZE == 0


def test_the_system_has_the_memory_back():
    num_bytes = 64 << 20
    pages = mmap.mmap(-1, num_bytes)
    side = np.frombuffer(pages, dtype=np.uint8).reshape(64, -1)
    side[:] = 1
    before = resident_bytes()
    release_blocks([[side]], range(64))
    assert before - resident_bytes() > num_bytes * 9 // 10
