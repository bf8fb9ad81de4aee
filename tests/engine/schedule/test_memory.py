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
    Windows,
    blocks_per_seq,
    bytes_of_gb,
    cache_bytes,
    max_batch,
    plan_pools,
    total_blocks,
)
from kvloom.contract.errors import BadRequest, ModelError, OutOfMemory

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


GEMMA_3_4B = {"layers": 34, "windowed": 29, "token_bytes": 2 * 4 * 256 * 2, "window": 1024}  # bytes of a layer, bf16
GPT_OSS_20B = {"layers": 24, "windowed": 12, "token_bytes": 2 * 8 * 64 * 2, "window": 128}


def shapes_of(model: dict[str, int], block_size: int = 16) -> tuple[CacheShape, CacheShape]:
    """With blocks of a window, and without."""
    token_bytes = model["layers"] * model["token_bytes"]
    windows = Windows(model["windowed"] * model["token_bytes"], model["window"] + 127)
    return CacheShape(token_bytes, block_size, windows=windows), CacheShape(token_bytes, block_size)


@pytest.mark.parametrize(("model", "most"), [(GEMMA_3_4B, 0.18), (GPT_OSS_20B, 0.505)])
def test_a_long_sequence_takes_what_its_windows_allow(model, most):
    """And at most 5 % more than the window's tokens alone would."""
    own, whole = shapes_of(model)
    share = own.seq_bytes(32768) / whole.seq_bytes(32768)
    windowed = model["windowed"] / model["layers"]
    least = 1 - windowed + windowed * model["window"] / 32768
    assert least < share < min(most, 1.05 * least)
    assert whole.seq_bytes(32768) == 32768 * whole.token_bytes
    assert own.seq_bytes(100) == own.pool_bytes(7, 7), "a short one takes as much of both"


@given(
    num_bytes=st.integers(1, 64 * GIB),
    max_seq_len=st.integers(1200, 200_000),
    max_batch=st.integers(1, 300),
    model=st.sampled_from([GEMMA_3_4B, GPT_OSS_20B]),
    length=st.integers(1, 200_000),
)
@example(num_bytes=2 * GIB, max_seq_len=8192, max_batch=64, model=GEMMA_3_4B, length=100)
@example(num_bytes=1 << 20, max_seq_len=8192, max_batch=64, model=GEMMA_3_4B, length=100)
def test_no_mix_of_sequences_has_less_than_half_of_the_bytes(num_bytes, max_seq_len, max_batch, model, length):
    """Sequences of any one length: as many fit as into half of what the longest one leaves, or as may run at once."""
    shape, _ = shapes_of(model)
    machine = Machine(100 * GIB, 100 * GIB, is_shared=True)
    wanted = wish(kv_cache_bytes=num_bytes, max_seq_len=max_seq_len, max_batch=max_batch)
    told, pools = "", None
    try:
        pools = plan_pools(wanted, shape, machine, 0)
    except OutOfMemory as error:
        told = str(error)
    if pools is None:
        assert f"fewer tokens than max_seq_len {max_seq_len}" in told
        least = int(told.rpartition(" ")[2])
        assert num_bytes < least
        pools = plan_pools(replace(wanted, kv_cache_bytes=least), shape, machine, 0)
        num_bytes = least
    assert shape.pool_bytes(pools.num_blocks, pools.num_window_blocks) <= num_bytes
    length = min(length, max_seq_len)
    blocks = shape.num_of(length), shape.num_of(min(length, shape.windows.reach + shape.block_size))
    num_fit = min(pools.num_blocks // blocks[0], pools.num_window_blocks // blocks[1])
    spare = num_bytes - shape.seq_bytes(max_seq_len)
    assert num_fit >= min(max_batch, spare // 2 // shape.seq_bytes(length) - 1)
    assert pools.num_blocks >= shape.num_of(max_seq_len), "the longest one fits"


def test_of_layers_that_all_have_a_window_the_blocks_are_the_windows():
    """Blocks of all tokens take no memory: there are as many as can be of use."""
    shape = CacheShape(1024, 16, windows=Windows(1024, 160))
    machine = Machine(GIB, GIB, is_shared=True)
    assert plan_pools(wish(64, max_seq_len=1600), shape, machine, 0) == Pools(800, 0, num_window_blocks=64)
    small = plan_pools(wish(8, max_seq_len=1600), shape, machine, 0)
    assert small == Pools(8, 0, num_window_blocks=8), "fewer than a window: no sequence is longer than they hold"
    pools = plan_pools(wish(kv_cache_bytes=1 << 20, max_seq_len=1600), shape, machine, 0)
    assert pools == Pools(800, 0, num_window_blocks=64)


def test_a_number_of_blocks_is_that_of_both():
    shape, machine = CacheShape(1024, 16, windows=Windows(512, 160)), Machine(GIB, GIB, is_shared=True)
    assert plan_pools(wish(64, max_seq_len=1600), shape, machine, 0) == Pools(64, 0, num_window_blocks=64)
    assert plan_pools(wish(640, max_seq_len=1600, max_batch=2), shape, machine, 0).num_window_blocks == 2 * 19
    with pytest.raises(OutOfMemory, match="lower max_seq_len to at most"):
        plan_pools(wish(max_seq_len=10**7), shape, machine, 0)
    pools = plan_pools(wish(max_seq_len=1600), shape, machine, 0)
    assert (pools.num_blocks, pools.num_window_blocks) == (800, 8 * 19), "as many as can be of use"
