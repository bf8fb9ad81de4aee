"""The engine's KV blocks and their bytes: one address for steps, copies and transfers; checksums where configured."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.contract.config import TierConfig
from kvloom.contract.errors import BadRequest, ModelError
from kvloom.contract.messages import Moved, RankInfo, Transfer
from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from kvloom.rank.fake import fake_answer
from kvloom.rank.host_cache import SwapCache
from kvloom.rank.kernels.backend import Backend
from kvloom.rank.kv_blocks import KvBlocks
from kvloom.rank.tier.ems import open_tier
from kvloom.rank.tier.kvmemory import KvMemory
from kvloom.rank.tier.tier import with_tier
from kvloom.rank.tier.watch import Watch, WrongBytes
from tests.support.engine.engines import fake_runner, run_all, tokens_of
from tests.support.engine.tiers import FakeTier, tiered_engine
from tests.support.pool.agents import running_agent
from tests.support.waiting import until

NUM_LAYERS = 2
SIZES = range(1, 129)  # values of cacheBlockSize


def stub(block_size: int, num_blocks: int, is_scaled: bool) -> Backend:
    """A backend's cache with random contents: 3 bytes a token; `is_scaled`: plus a float32."""
    random = np.random.default_rng(block_size)
    sizes = [3 * block_size, 4 * block_size] if is_scaled else [3 * block_size]
    layers = [
        [random.integers(0, 256, (num_blocks, s), np.uint8) for s in sizes for _ in "kv"] for _ in range(NUM_LAYERS)
    ]
    parts = tuple(part for layer in layers for part in layer)
    backend = SimpleNamespace(
        name="cpu", block_size=block_size, num_blocks=num_blocks, kv_parts=parts, kv_layers=layers
    )
    backend.kv_bytes, backend.copy = sum(part.nbytes for part in parts), np.copyto
    return backend


def together(backend: Backend) -> Backend:
    """The same cache with all layers of a block contiguous, as in the CPU kernels."""
    whole, at = np.concatenate(backend.kv_parts, 1), 0
    for layer in backend.kv_layers:
        for index, part in enumerate(layer):
            layer[index], at = whole[:, at : at + part.shape[1]], at + part.shape[1]
    backend.kv_parts = (whole,)
    return backend


def bytes_of(blocks: KvBlocks, block: int) -> bytes:
    return b"".join(blocks.read(block))


def memory_of(blocks: KvBlocks) -> KvMemory:
    return KvMemory(blocks.layers, blocks.num_blocks, blocks.block_size, blocks.block_bytes, blocks.read, "m", "l")


@given(size=st.sampled_from(SIZES), is_together=st.booleans(), is_scaled=st.booleans())
def test_a_block_is_the_same_bytes_for_steps_copies_and_transfers(size, is_together, is_scaled):
    backend = stub(size, 3, is_scaled)
    if is_together:
        backend = together(backend)
    blocks = KvBlocks(backend)
    assert (blocks.num_blocks, blocks.block_size) == (3, size)
    memory = memory_of(blocks)
    for layer in memory.layers:
        for side in layer:
            for block in range(3):
                side[block] = block + 1
    for block in range(3):
        assert set(bytes_of(blocks, block)) == {block + 1}
        own = [part[block] for part in backend.kv_parts]
        assert all((part == block + 1).all() for part in own)
    swap = SwapCache(blocks.parts, num_blocks=2)
    swap.save([(2, 0), (0, 1)])
    swap.load([(0, 1)])
    assert [set(bytes_of(blocks, block)) for block in range(3)] == [{1}, {3}, {3}]


@pytest.mark.parametrize("is_together", [False, True])
@pytest.mark.parametrize("is_scaled", [False, True])
def test_what_ems_loads_is_what_it_saved_for_every_block_size(is_scaled, is_together, monkeypatch):
    monkeypatch.setenv("EMS_SOCKET", "")
    with running_agent() as agent:
        config = TierConfig("kvloom.rank.tier.ems:open_tier", 5.0, {"socket": str(agent.config.socket)})
        for size in SIZES:
            backend = stub(size, 5, is_scaled)
            blocks = KvBlocks(together(backend) if is_together else backend)
            tier = open_tier(memory_of(blocks), config)
            true = [bytes_of(blocks, block) for block in range(5)]
            for id, (move, moved) in enumerate(((tier.save, [4, 0]), (tier.load, [1, 3]))):
                move(Transfer(id, moved, [b"a", b"b"]))
                assert until(tier.poll) == [Moved(id, 2)]
            tier.close()
            assert [bytes_of(blocks, block) for block in range(5)] == [true[i] for i in (0, 4, 2, 0, 4)], f"size {size}"


# -- between runner and tier


def fake_memory(**changes: int) -> KvMemory:
    memory = fake_runner(8, 32).kv_memory("")
    fields = {"num_blocks": 8, "block_size": 32, "block_bytes": memory.block_bytes, **changes}
    return KvMemory(memory.layers, **fields, read=memory.read, model="m", layout="l")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_blocks": 4, "block_size": 64}, r"the KV cache has blocks and tokens \[8, 32\], expected \[4, 64\]"),
        ({"num_blocks": 7}, r"the KV cache has blocks and tokens \[8, 32\], expected \[7, 32\]"),
        ({"block_bytes": 64}, "8 KV blocks have 2048 bytes, expected 64 each"),
    ],
)
def test_tensors_that_are_not_in_the_blocks_of_transfers_are_refused(changes, problem):
    with pytest.raises(ModelError, match=problem):
        fake_memory(**changes)


@pytest.mark.parametrize(
    ("runner", "problem"),
    [
        (fake_runner(16, 16), r"has blocks and tokens \[8, 32\], the engine is told \[16, 16\]"),
        (fake_runner(4, 64), r"has blocks and tokens \[8, 32\], the engine is told \[4, 64\]"),
    ],
)
def test_a_tier_over_other_blocks_than_the_engines_is_refused(runner, problem):
    with pytest.raises(ModelError, match=problem):
        with_tier(runner, TierConfig("tests.support.engine.tiers:FakeTier"), fake_memory())


def test_blocks_of_other_bytes_than_the_rank_says_are_refused():
    info = RankInfo(8, 32, 100, 100, "fake", kv_bytes=8 * 32 * 8)
    fake_memory().check(info)
    info.kv_bytes = 8 * 32 * 16
    with pytest.raises(ModelError, match="the KV cache has 4096 bytes, its blocks 8 times 256"):
        fake_memory().check(info)


# -- the checksum watch

PROMPT = tuple(range(1, 18))
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def answer(stored: dict[bytes, list[int]]) -> list[int]:
    engine, _, _ = tiered_engine(stored)
    return tokens_of(run_all(engine, Request("a", PROMPT, PARAMS))["a"])


def put_elsewhere(tier: FakeTier, block: int, values: list[int] | None) -> None:
    WRITE(tier, (block + 1) % 64, values)


def put_turned(tier: FakeTier, block: int, values: list[int] | None) -> None:
    WRITE(tier, block, values and values[3::-1] + values[4:])


def put_nothing(tier: FakeTier, block: int, values: list[int] | None) -> None:
    pass


def take_elsewhere(tier: FakeTier, block: int) -> list[int]:
    return READ(tier, block // 2)


WRITE, READ = FakeTier._write, FakeTier._read


@pytest.mark.parametrize("wrong", [put_elsewhere, put_turned, put_nothing, take_elsewhere])
def test_a_watched_load_that_brings_other_bytes_ends_the_rank(wrong, monkeypatch):
    stored: dict[bytes, list[int]] = {}
    monkeypatch.setattr(FakeTier, "_read" if wrong is take_elsewhere else "_write", wrong)
    assert answer(stored) == fake_answer(PROMPT, PARAMS, 0, 8)
    with pytest.raises(WrongBytes, match=r"block \d+ was loaded and does not hold what was saved"):
        answer(stored)


def test_a_watched_load_that_touches_another_block_ends_the_rank(monkeypatch):
    """The other block belongs to a request that decodes."""
    stored: dict[bytes, list[int]] = {}
    answer(stored)
    engine, _tier, _ = tiered_engine(stored)
    engine.add(Request("near", tuple(range(50, 70)), SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)))
    for _ in range(4):
        engine.step()

    def write(tier: FakeTier, block: int, values: list[int] | None) -> None:
        WRITE(tier, block, values)
        WRITE(tier, 1, values)

    monkeypatch.setattr(FakeTier, "_write", write)
    with pytest.raises(WrongBytes, match="block 1 has changed, though no step and no load of it has written there"):
        run_all(engine, Request("a", PROMPT, PARAMS))


def test_what_is_saved_must_be_what_was_computed():
    """A full block is overwritten between the step that filled it and its save."""
    engine, tier, _ = tiered_engine()
    engine.add(Request("a", PROMPT, PARAMS))
    for _ in range(2):  # the tier has no hit, so the prompt is computed
        engine.step()
    WRITE(tier, 1, None)
    with pytest.raises(WrongBytes, match="block 1 has changed"):
        engine.step()


def test_a_cache_on_a_device_cannot_be_watched():
    class OnDevice:
        shape, nbytes = (8, 32, 1), 2048

        def __array__(self, *_: object) -> np.ndarray:
            raise TypeError("on a device")

    memory = KvMemory([[OnDevice()]], 8, 32, 256, lambda block: [], "m", "l")
    with pytest.raises(BadRequest, match=r"kv_tier\.is_watched: needs a KV cache in host memory"):
        Watch(memory)
