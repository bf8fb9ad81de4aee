"""Copies of saves and loads: every instruction set moves the same bytes, and the checksum is that of the copy."""

import ctypes
from pathlib import Path

import numpy as np
import pytest
import xxhash

from ems.native.build import Library
from ems.native.library import xxh3
from ems.runs import address_of

LINE, MARGIN = 64, 64


@pytest.fixture(scope="module")
def copies() -> ctypes.CDLL:
    return ctypes.CDLL(str(Library("libtest_native", Path(__file__).parents[1] / "native").path()))


@pytest.mark.parametrize("offset", [0, 1, 63])
@pytest.mark.parametrize("num_lines", [0, 1, 5, 128])
@pytest.mark.parametrize("which", [0, 1], ids=["sse2", "avx512"])
def test_lines_are_copied_to_both_targets_and_nowhere_else(copies, which, num_lines, offset):
    if not copies.has(which):
        pytest.skip("this processor does not have it")
    size = num_lines * LINE
    source = np.random.default_rng(size).integers(1, 256, offset + size, np.uint8)
    targets = []
    for _ in range(2):
        memory = np.zeros(size + 2 * MARGIN + LINE, np.uint8)
        start = MARGIN + -(address_of(memory) + MARGIN) % LINE
        targets.append((memory, memory[start : start + size]))
    addresses = [
        ctypes.c_void_p(address_of(memory) + inner.ctypes.data - memory.ctypes.data) for memory, inner in targets
    ]
    copies.copy(which, *addresses, ctypes.c_void_p(address_of(source) + offset), ctypes.c_size_t(size))
    for memory, inner in targets:
        assert np.array_equal(inner, source[offset:])
        assert np.count_nonzero(memory) == size


@pytest.mark.parametrize("offset", [0, 1, 63])
@pytest.mark.parametrize("num_lines", [0, 1, 5, 256])
@pytest.mark.parametrize("which", [0, 1], ids=["sse2", "avx512"])
def test_lines_of_a_load_are_copied_and_nothing_else(copies, which, num_lines, offset):
    if not copies.has(which):
        pytest.skip("this processor does not have it")
    size = num_lines * LINE
    source = np.random.default_rng(size).integers(1, 256, offset + size, np.uint8)
    memory = np.zeros(size + 2 * MARGIN + LINE, np.uint8)
    start = MARGIN + -(address_of(memory) + MARGIN) % LINE
    addresses = (address_of(memory) + start, address_of(source) + offset)
    copies.move(which, *map(ctypes.c_void_p, addresses), ctypes.c_size_t(size))
    assert np.array_equal(memory[start : start + size], source[offset:])
    assert np.count_nonzero(memory) == size


@pytest.mark.parametrize("offset", [0, 1, 16, 63])
@pytest.mark.parametrize("size", [1, 1023, 1024, 1087, 1088, 4000, 16384, 16385, 70_001])
def test_a_piece_of_any_size_is_copied_wherever_it_lies(copies, size, offset):
    source = np.random.default_rng(size).integers(1, 256, size, np.uint8)
    memory = np.zeros(size + 2 * MARGIN + LINE, np.uint8)
    start = MARGIN + -(address_of(memory) + MARGIN) % LINE + offset
    addresses = (address_of(memory) + start, address_of(source))
    copies.copy_ahead(*map(ctypes.c_void_p, addresses), ctypes.c_size_t(size))
    assert np.array_equal(memory[start : start + size], source)
    assert np.count_nonzero(memory) == size


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("size", [1, 100, 8192, 8193, 65535, 65536, 65537, 65599, 200_003])
def test_a_block_of_any_size_is_copied_and_its_sum_is_that_of_the_copy(copies, size, offset):
    functions = xxh3()
    assert functions is not None
    source = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    memory = np.zeros(size + 2 * LINE, np.uint8)
    start = -address_of(memory) % LINE + offset
    target, digest = memory[start : start + size], ctypes.create_string_buffer(16)
    addresses = [ctypes.c_void_p(each.ctypes.data) for each in (target, source)]
    copies.copy_summed(ctypes.byref(functions), *addresses, ctypes.c_size_t(size), digest)
    assert np.array_equal(target, source)
    assert digest.raw == xxhash.xxh3_128_digest(target)
    assert not memory[start + size :].any()
