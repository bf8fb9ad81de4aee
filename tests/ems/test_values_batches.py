"""How a batch of values is cut into messages."""

import pytest

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
