"""How a batch of values is cut into messages, and where it may be written."""

import numpy as np
import pytest

from ems.common.exception import EmsException
from ems.values.memory import check_apart
from ems.values.moving import groups_of


@pytest.mark.parametrize(
    ("sizes", "max_bytes", "groups"),
    [
        ([], 100, []),
        ([64], 10, [1]),
        ([64, 64, 64], 128, [2, 1]),
        ([200, 1, 1], 64, [1, 1, 1]),
        ([1] * 130, 1 << 20, [64, 64, 2]),
    ],
)
def test_batches_are_cut_into_groups(sizes, max_bytes, groups):
    made = groups_of(sizes, max_bytes)
    assert list(map(len, made)) == groups
    assert [i for group in made for i in group] == list(range(len(sizes)))


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ([[(0, 4)], [(4, 4)], [(8, 0)], [(8, 4)]], ""),
        ([[(8, 4), (0, 4)], [(4, 4)]], ""),
        ([[(4, 8)], [(0, 5)]], r"targets\[1\]: overlaps targets\[0\]"),
        ([[(0, 12)], [(20, 4)], [(2, 1)]], r"targets\[2\]: overlaps targets\[0\]"),
        ([[(0, 4)], [(8, 4), (9, 1)]], r"targets\[1\]: overlaps itself"),
    ],
)
def test_what_is_written_lies_apart(values, problem):
    memory = np.zeros(24, np.uint8)
    pieces = [[memory[start : start + size] for start, size in value] for value in values]
    if not problem:
        check_apart("targets", pieces)
        return
    with pytest.raises(EmsException, match=problem):
        check_apart("targets", pieces)
