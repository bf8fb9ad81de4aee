"""KV blocks in memory and sequences in blocks: the worked example of the tuning guide (spec 2.3.2), refusals."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvloom.contract.capacity import (
    AUTO_MAX_CPU_BYTES,
    GIB,
    MOST_EMPTY_BLOCKS,
    SHARE,
    CacheShape,
    CapacityRequest,
    Machine,
    Pools,
    blocks_per_seq,
    bytes_of_gb,
    cache_bytes,
    max_batch,
    plan_pools,
    total_blocks,
)
from kvloom.contract.errors import BadRequest, ModelError

SMALL = CacheShape(token_bytes=1024, block_size=16)  # 16 KiB per block


def wish(
    num_blocks: int | None = None,
    kv_cache_bytes: int | None = None,
    num_host_blocks: int | None = None,
    host_cache_bytes: int | None = 0,
    max_seq_len: int = 160,
    max_batch: int = 8,
) -> CapacityRequest:
    return CapacityRequest(num_blocks, kv_cache_bytes, num_host_blocks, host_cache_bytes, max_seq_len, max_batch)


def test_the_worked_example_of_a_65b_model_on_eight_devices():
    layers, heads, head_bytes = 80, 64, 2 * 128
    shape = CacheShape(2 * layers * heads * head_bytes, block_size=128, world_size=8)
    assert total_blocks(34 * GIB, shape) == 870
    assert blocks_per_seq(100, 512, 128) == 5
    assert blocks_per_seq(1, 1, 128) == 2  # prompt and answer are rounded up separately
    assert max_batch(870, 5) == 174


def test_automatic_takes_four_fifths_of_what_weights_and_working_memory_leave():
    assert cache_bytes(61 * GIB, 130 * GIB, world_size=8, working_bytes=2 * GIB) == int((61 - 130 / 8 - 2) * GIB * 0.8)
    assert cache_bytes(GIB, 2 * GIB) == 0


@pytest.mark.parametrize(("size_gb", "num_bytes"), [(-1, None), (0, 0), (2.5, 5 * GIB // 2)])
def test_sizes_are_in_gb_and_minus_one_is_measured(size_gb, num_bytes):
    assert bytes_of_gb(size_gb) == num_bytes


@pytest.mark.parametrize("size_gb", [-2, -0.5, float("nan")])
def test_other_negative_sizes_are_refused(size_gb):
    with pytest.raises(BadRequest, match="must be -1"):
        bytes_of_gb(size_gb)


@given(
    free=st.integers(0, 100 * GIB),
    host=st.integers(0, 100 * GIB),
    weights=st.integers(0, 50 * GIB),
    is_shared=st.booleans(),
    max_seq_len=st.integers(2, 10**6),
    max_batch=st.integers(1, 1000),
)
@example(free=8 * GIB, host=GIB, weights=GIB, is_shared=True, max_seq_len=1000, max_batch=10)
@example(free=8 * GIB, host=GIB, weights=GIB, is_shared=False, max_seq_len=1000, max_batch=10)
@example(free=GIB, host=GIB, weights=GIB, is_shared=True, max_seq_len=1000, max_batch=10)
def test_automatic_pools_hold_a_sequence_and_fit_or_say_what_to_lower(
    free, host, weights, is_shared, max_seq_len, max_batch
):
    machine = Machine(free, free if is_shared else host, is_shared)
    asked = wish(host_cache_bytes=None, max_seq_len=max_seq_len, max_batch=max_batch)
    left = free - weights - machine.working_bytes
    if -(-max_seq_len // 16) * SMALL.block_bytes > left:
        with pytest.raises(ModelError, match=r"max_seq_len|smaller model"):
            plan_pools(asked, SMALL, machine, weights)
        return
    pools = plan_pools(asked, SMALL, machine, weights)
    per_seq = -(-max_seq_len // 16)
    assert per_seq <= pools.num_blocks <= per_seq * max_batch
    device, second = pools.num_blocks * SMALL.block_bytes, pools.num_host_blocks * SMALL.block_bytes
    assert device <= left
    assert device + weights + (second if is_shared else 0) <= free
    assert is_shared or second <= host * SHARE
    assert device <= max(per_seq * SMALL.block_bytes, int((free - weights) * SHARE))
    assert not is_shared or device <= max(per_seq * SMALL.block_bytes, AUTO_MAX_CPU_BYTES)


@given(free=st.integers(0, 12 * GIB), weights=st.integers(0, 4 * GIB), num_models=st.integers(1, 5))
def test_automatic_pools_of_several_models_fit_together_or_are_refused(free, weights, num_models):
    """Each is planned before the memory of those before it is taken, but for their weights."""
    promised, sizes = 0, []
    for index in range(num_models):
        left = max(0, free - index * weights - promised)
        machine = Machine(left, left, True, num_models - index)
        try:
            pools = plan_pools(wish(host_cache_bytes=None, max_seq_len=1000, max_batch=10**4), SMALL, machine, weights)
        except ModelError:
            return
        sizes.append(pools.num_blocks * SMALL.block_bytes)
        promised += sizes[-1] + pools.num_host_blocks * SMALL.block_bytes
    assert num_models * weights + promised <= free
    assert sizes[0] <= max(-(-1000 // 16) * SMALL.block_bytes, (free - weights) * SHARE / num_models)


@given(free=st.integers(0, 40 * GIB), weights=st.integers(0, 4 * GIB), num_replicas=st.integers(1, 9))
def test_pools_of_replicas_that_are_planned_at_the_same_time_fit_together(free, weights, num_replicas):
    """Unless each has room for one sequence only."""
    machine = Machine(free, free, True, num_replicas)
    try:
        pools = plan_pools(wish(host_cache_bytes=None, max_seq_len=1000, max_batch=10**4), SMALL, machine, weights)
    except ModelError:
        return
    if pools.num_blocks > -(-1000 // 16):
        taken = (pools.num_blocks + pools.num_host_blocks) * SMALL.block_bytes
        assert weights + num_replicas * taken <= free


def test_sizes_that_are_given_are_taken():
    machine = Machine(4 * GIB, 4 * GIB, is_shared=True)
    found = plan_pools(
        wish(kv_cache_bytes=50 * SMALL.block_bytes, host_cache_bytes=7 * SMALL.block_bytes), SMALL, machine, 0
    )
    assert found == Pools(50, 7)
    assert plan_pools(wish(num_blocks=3, num_host_blocks=9), SMALL, machine, 0) == Pools(3, 9)
    assert plan_pools(wish(kv_cache_bytes=2 * GIB), SMALL, machine, 0) == Pools(80, 0)  # more blocks would be useless


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"kv_cache_bytes": 5 * GIB}, r"lower kv_cache_bytes \(npuMemSize\) to at most 2.40 GB"),
        ({"kv_cache_bytes": 9 * 2**14}, "hold 144 tokens, fewer than max_seq_len 160; lower max_seq_len"),
        ({"num_blocks": 10**6}, "lower num_blocks to at most 196608"),
        ({"max_seq_len": 10**7}, "lower max_seq_len to at most 3014656 tokens"),
        ({"host_cache_bytes": 4 * GIB}, r"lower host_cache_bytes \(cpuMemSize\) to at most 2.40 GB"),
        ({"num_host_blocks": 10**6}, "lower num_host_blocks to at most"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_number_to_lower(fields, says):
    with pytest.raises(ModelError, match=says):
        plan_pools(wish(**fields), SMALL, Machine(4 * GIB, 4 * GIB, is_shared=True), GIB)
    with pytest.raises(ModelError, match="smaller model"):
        plan_pools(wish(**fields), SMALL, Machine(4 * GIB, 4 * GIB, is_shared=True), 5 * GIB)


STATEFUL = CacheShape(token_bytes=1024, block_size=16, state_bytes=100 << 10)
ROOMY = Machine(GIB, GIB, is_shared=True)


def test_states_get_half_of_a_cache_at_most_and_blocks_the_rest():
    planned = plan_pools(wish(kv_cache_bytes=1 << 20, max_batch=64), STATEFUL, ROOMY, 0)
    assert planned == Pools((1 << 20) // (16 << 10) - 500 // 16 - 1, 0, num_states=5)
    assert plan_pools(wish(kv_cache_bytes=1 << 20, max_batch=3), STATEFUL, ROOMY, 0).num_states == 3


def test_blocks_beyond_what_all_sequences_with_a_state_can_hold_would_be_useless():
    assert plan_pools(wish(max_batch=4), STATEFUL, ROOMY, 0) == Pools(4 * 10, 0, num_states=4)


def test_the_longest_sequence_has_room_beside_its_state():
    least = 10 * (16 << 10) + (100 << 10)
    assert plan_pools(wish(kv_cache_bytes=least), STATEFUL, ROOMY, 0) == Pools(10, 0, num_states=1)
    with pytest.raises(ModelError, match=f"hold 144 tokens, fewer than max_seq_len 160; .* at least {least}"):
        plan_pools(wish(kv_cache_bytes=least - 1), STATEFUL, ROOMY, 0)
    with pytest.raises(ModelError, match="hold 0 tokens, fewer than max_seq_len 160"):
        plan_pools(wish(kv_cache_bytes=1), STATEFUL, ROOMY, 0)


def test_with_a_given_number_of_blocks_states_take_what_is_left():
    machine = Machine(2 << 20, GIB, is_shared=True)
    room = int((2 << 20) * SHARE) - 40 * (16 << 10)
    assert plan_pools(wish(num_blocks=40, max_batch=64), STATEFUL, machine, 0) == Pools(40, 0, room // (100 << 10))
    with pytest.raises(ModelError, match=r"num_blocks asks for 0\.00 GB of KV cache and 0\.00 GB are left"):
        plan_pools(wish(num_blocks=125), STATEFUL, machine, 0)


def test_snapshots_have_a_share_of_their_own_and_leave_room_for_the_longest_sequence():
    shared = wish(kv_cache_bytes=1 << 20, max_batch=3)
    planned = plan_pools(replace(shared, snapshot_share=0.25), STATEFUL, ROOMY, 0)
    assert planned == Pools(3 * 10, 0, num_states=3, num_snapshots=2)
    planned = plan_pools(replace(shared, snapshot_share=0.9), STATEFUL, ROOMY, 0)
    assert planned == Pools(14, 0, num_states=3, num_snapshots=5), "the longest sequence has 10 blocks"
    assert planned.num_places == 3 + 5
    assert plan_pools(replace(wish(max_batch=3), snapshot_share=0.25), STATEFUL, ROOMY, 0).num_snapshots == 1024


def test_a_context_longer_than_an_automatic_cache_leaves_its_share_to_states():
    machine = Machine(8 * GIB, 8 * GIB, is_shared=True)
    long = wish(max_seq_len=16 * (3 * GIB >> 14), max_batch=64)
    assert plan_pools(long, STATEFUL, machine, 0) == Pools(3 * GIB >> 14, 0, num_states=64)


def test_blocks_of_a_model_without_keys_and_values_take_no_memory_and_are_as_many_as_its_sequences_can_hold():
    empty = CacheShape(token_bytes=0, block_size=16, state_bytes=100 << 10)
    assert plan_pools(wish(kv_cache_bytes=1 << 20, max_batch=64), empty, ROOMY, 0) == Pools(5 * 10, 0, num_states=5)
    assert plan_pools(wish(num_blocks=7, num_host_blocks=0), empty, ROOMY, 0) == Pools(7, 0, num_states=8)
    long = wish(max_seq_len=1 << 20, max_batch=64)
    assert plan_pools(long, empty, ROOMY, 0) == Pools(MOST_EMPTY_BLOCKS, 0, num_states=64)
    with pytest.raises(ModelError, match=r"0\.00 GB are free"):
        plan_pools(wish(), empty, Machine(100, 100, is_shared=True), 0)
