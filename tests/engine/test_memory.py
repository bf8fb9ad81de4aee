"""Blocks in memory and sequences in blocks: the worked example of the tuning guide, and the refusals."""

import pytest

from kvloom.engine.errors import BadRequest
from kvloom.engine.memory import GIB, CacheShape, blocks_per_request, cache_bytes, max_batch, total_blocks


def test_the_worked_example_of_a_65b_model_on_eight_devices():
    shape = CacheShape(num_layers=80, num_kv_heads=64, head_dim=128, world_size=8)
    assert total_blocks(34 * GIB, shape) == 870
    assert blocks_per_request(100, 512, 128) == 5
    assert max_batch(870, 5) == 174


def test_automatic_leaves_a_fifth_of_what_the_weights_leave():
    assert cache_bytes(-1, 64 * GIB, 160 * GIB, world_size=8, used_bytes=4 * GIB) == int(40 * GIB * 0.8)


def test_a_configured_size_is_taken_as_it_is():
    assert cache_bytes(2.5, 8 * GIB, 4 * GIB) == int(2.5 * GIB)


@pytest.mark.parametrize(
    ("size_gb", "free_gb", "says"), [(-1, 1, "smaller model"), (5, 8, "at most 4.00"), (0, 8, "must be -1")]
)
def test_what_does_not_fit_is_refused_with_the_number_to_lower(size_gb, free_gb, says):
    with pytest.raises(BadRequest, match=says):
        cache_bytes(size_gb, free_gb * GIB, 4 * GIB)


def test_heads_must_be_divisible_between_ranks():
    with pytest.raises(BadRequest, match="world_size"):
        CacheShape(num_layers=1, num_kv_heads=3, head_dim=8, world_size=2)
