"""What a link does with frames in C++: checksums, and polling for an answer before it sleeps."""

import ctypes
import zlib
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest

from ems.native.build import Library
from ems.runs import address_of

YES, NO = b"\1", b"\0"


@pytest.fixture(scope="module")
def frames() -> ctypes.CDLL:
    library = ctypes.CDLL(str(Library("libtest_native", Path(__file__).parents[1] / "native").path()))
    library.crc.restype = ctypes.c_uint32
    return library


@pytest.mark.parametrize("offset", [0, 1, 15])
def test_the_checksum_of_any_length_is_that_of_zlib(frames, offset):
    data = np.random.default_rng(offset).integers(0, 256, 5000, np.uint8)
    for size in [*range(300), 1023, 1024, 1025, 4900]:
        part = data[offset : offset + size]
        before = size * 0x9E3779B1 & 0xFFFFFFFF
        found = frames.crc(ctypes.c_void_p(address_of(data) + offset), ctypes.c_size_t(size), ctypes.c_uint32(before))
        assert found == zlib.crc32(part.data, before), f"{size} bytes"


def pauses(frames: ctypes.CDLL, was_preempted: bytes, has_come: bytes) -> list[int]:
    """Lengths of the runs of answers for which the link did not poll."""
    looked = ctypes.create_string_buffer(len(has_come))
    frames.look(was_preempted, has_come, ctypes.c_size_t(len(has_come)), looked)
    return [len(list(same)) for is_looked, same in groupby(looked.raw) if not is_looked]


def test_an_answer_that_comes_soon_is_always_looked_for(frames):
    assert pauses(frames, NO * 500, YES * 500) == []


def test_who_looks_in_vain_leaves_out_twice_as_many_each_time_up_to_63(frames):
    assert pauses(frames, NO * 400, NO * 400)[:8] == [1, 3, 7, 15, 31, 63, 63, 63]


def test_who_is_preempted_all_the_time_does_not_look(frames):
    assert pauses(frames, YES * 500, YES * 500) == [500]


def test_who_was_preempted_looks_again_when_that_is_over(frames):
    assert pauses(frames, YES + NO * 500, YES * 501) == [1]
