"""Random calls on agents of several kinds, with caches of many shapes: every byte and every report is the oracle's."""

import random
from collections import Counter

import pytest

from tests.support.pool.walk import Walk
from tests.support.pool.worlds import World


@pytest.mark.parametrize(("kind", "num_rounds"), [("one, lru, snapshot", 5), ("one, direct", 4), ("three, TLS", 3)])
def test_what_is_saved_is_what_is_found(kind, num_rounds, tmp_path):
    counts: Counter[str] = Counter()
    with World(kind, tmp_path) as world:
        Walk(world, random.Random(7), counts).run(num_rounds)
    assert counts["blocks compared"] > 0
    assert counts["values compared"] > 0
