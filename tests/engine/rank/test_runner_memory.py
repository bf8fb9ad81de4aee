"""ModelRunner over tiny random models: blocks of several tiles, the host's pool, and running out of memory."""

import numpy as np
import pytest

from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import ModelError, OutOfMemory
from kvloom.contract.messages import Batch
from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.engine import Engine
from kvloom.rank.host_cache import SwapCache
from kvloom.rank.kernels.reference import ReferenceBackend
from kvloom.rank.loading import open_runner
from kvloom.rank.runner import ModelRunner
from tests.support.engine.engines import engine_over, run_all, tokens_of
from tests.support.models.checkpoints import save, tiny_model

PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
REQUESTS = [Request(f"r{i}", tuple(range(i, i + 30)), PARAMS) for i in range(8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tiny_model("llama", head_dim=32), tmp_path_factory.mktemp("llama"))


def open_small(folder, backend: str, **fields) -> ModelRunner:
    config = EngineConfig(model=str(folder), backend=backend, max_seq_len=100, **fields)
    return open_runner(config, [], lambda done, total: None)


def answers(runner: ModelRunner, **fields) -> tuple[dict[str, list[int]], Engine]:
    """Tokens of REQUESTS, and the engine. Its steps have room for whole chunks, so that the reference's sums agree."""
    engine = engine_over(runner, max_batch=8, **fields)
    return {id: tokens_of(deltas) for id, deltas in run_all(engine, *REQUESTS).items()}, engine


@pytest.mark.usefixtures("swaps_always")
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_swapped_out_and_back_gives_the_same_tokens(folder, backend):
    wanted, roomy = answers(open_small(folder, backend))
    found, tight = answers(open_small(folder, backend, num_blocks=12, num_host_blocks=40))
    assert found == wanted
    assert roomy.stats().total_preemptions == 0
    assert tight.stats().total_swapped > 0
    assert tight.stats().num_free_host_blocks == 40


@pytest.mark.usefixtures("swaps_always")
@pytest.mark.parametrize(("backend", "block_size"), [("reference", 24), ("cpu", 64)])
def test_the_block_size_changes_no_token(folder, backend, block_size):
    wanted, _ = answers(open_small(folder, backend))
    runner = open_small(folder, backend, block_size=block_size, num_blocks=7, num_host_blocks=6)
    assert (runner.info.block_size, runner.info.num_blocks) == (block_size, 7)
    found, tight = answers(runner)
    assert found == wanted
    assert tight.stats().total_swapped > 0


def test_a_block_size_that_the_kernels_do_not_have_is_refused(folder):
    with pytest.raises(ModelError, match="block_size: the cpu backend has multiples of 16, got 24"):
        open_small(folder, "cpu", block_size=24)


def test_what_does_not_fit_in_this_machine_is_refused_before_it_is_taken(folder):
    with pytest.raises(
        OutOfMemory, match=rf"^{folder}: out of memory: .* lower kv_cache_bytes \(npuMemSize\) to at most"
    ):
        open_small(folder, "cpu", kv_cache_bytes=2**50)
    with pytest.raises(ModelError, match=r"lower host_cache_bytes \(cpuMemSize\) to at most"):
        open_small(folder, "reference", host_cache_bytes=2**50)


@pytest.mark.parametrize(
    "error",
    [MemoryError(), OSError(12, "Cannot allocate memory"), RuntimeError("DefaultCPUAllocator: not enough memory")],
)
def test_memory_that_goes_away_meanwhile_is_one_sentence_too(folder, monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(ReferenceBackend, "__init__", fail)
    with pytest.raises(ModelError, match=rf"^{folder}: out of memory: .* lower kv_cache_bytes \(npuMemSize\)"):
        open_small(folder, "reference")


def test_another_error_of_a_backend_stays_what_it_is(folder, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(ReferenceBackend, "__init__", fail)
    with pytest.raises(RuntimeError, match="shapes differ"):
        open_small(folder, "reference")


def test_copies_keep_every_byte_and_measuring_changes_none():
    parts = [np.random.default_rng(size).integers(0, 256, (7, size), np.uint8) for size in (3, 4)]
    wanted = [part.copy() for part in parts]
    pairs = [part[:6].reshape(3, -1) for part in parts]  # two blocks of the backend form one
    cache = SwapCache(pairs, num_blocks=4)
    assert cache.measure() > 0
    assert all(np.array_equal(part, want) for part, want in zip(parts, wanted, strict=True))
    cache.save([(2, 0), (0, 3)])
    for part in parts:
        part[:] = 0
    cache.load([(0, 1), (3, 2)])
    for part, want in zip(parts, wanted, strict=True):
        assert np.array_equal(part[2:4], want[4:6])
        assert np.array_equal(part[4:6], want[:2])
        assert not part[:2].any()
    assert SwapCache(pairs, num_blocks=0).measure() == 0


def test_a_block_of_all_layers_lies_together(folder):
    """So memory follows use with huge pages too: a block touches as few of them as possible."""
    runner = open_small(folder, "cpu", num_blocks=8, block_size=64)
    sides = [side for layer in runner.kv_layers for side in layer]
    block_bytes = runner.info.kv_bytes // 8
    assert {side.strides[0] for side in sides} == {block_bytes}
    first = [side.ctypes.data - sides[0].ctypes.data for side in sides]
    assert first == list(range(0, block_bytes, block_bytes // len(sides)))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_blocks_that_are_given_back_leave_the_others_as_they_are(folder, backend):
    runner = open_small(folder, backend, num_blocks=64, block_size=64)
    for layer in runner.kv_layers:
        for side in layer:
            side[:] = 7
    runner.run(Batch([], [], [], release=list(range(8, 64))))
    sides = [side for layer in runner.kv_layers for side in layer]
    assert all((side[:8] == 7).all() for side in sides)
    assert any(not side[9:63].any() for side in sides)
    wanted, _ = answers(open_small(folder, backend))
    assert answers(runner)[0] == wanted
