"""An answer whose prefix is loaded from EMS equals the computed answer, and requests beside it are unaffected.

For every block size, type of keys and values, number of ranks, and adapter; after restarts with other settings a prefix
is found or missed, never confused with another. All runs check their blocks: a wrong byte ends the rank.
"""

import functools
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.contract.config import EngineConfig, TierConfig
from kvloom.contract.errors import ModelError
from kvloom.contract.request import Delta, Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.engine import Engine
from kvloom.engine.stats import Stats
from kvloom.pool.agent import Agent
from kvloom.rank.fake import ByteTokenizer
from kvloom.rank.main import open_runner
from tests.support.engine.engines import drain, tokens_of
from tests.support.engine.executors import opened
from tests.support.models.adapters import make_adapter
from tests.support.models.checkpoints import save, tiny_model
from tests.support.pool.agents import running_agent
from tests.support.waiting import until

FACTORY = "kvloom.rank.tier.ems:open_tier"
KERNEL_SIZES = range(16, 129, 16)  # the values of cacheBlockSize that the CPU kernels have, 1 to 128
ODD_SIZES = (1, 7, 16, 20, 100, 128)  # those of the reference backend, which has all
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = replace(GREEDY, max_tokens=20)
ASKED = [Request(f"asked{i}", tuple((i * 31 + j * (7 + i)) % 127 for j in range(130 + 20 * i)), GREEDY) for i in (0, 1)]
NEIGHBOURS = [Request(f"near{i}", tuple((1 + i * 17 + j * 5) % 113 for j in range(30 + i)), LONG) for i in range(3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save(tiny_model("qwen3"), tmp_path_factory.mktemp("model"))  # head size 32, which the kernels have


@pytest.fixture(scope="module")
def adapters(model, tmp_path_factory) -> list[str]:
    shapes = open_checkpoint(model).spec.tensor_shapes()
    folder = tmp_path_factory.mktemp("adapters")
    return [str(make_adapter(folder / str(seed), shapes, seed)) for seed in range(2)]


@pytest.fixture
def agent(monkeypatch) -> Iterator[Agent]:
    monkeypatch.setenv("EMS_SOCKET", "")
    with running_agent(pool_bytes=32 << 20) as running:
        yield running


def settings(model: Path, backend: str, agent: Agent | None = None, **fields: object) -> EngineConfig:
    """Float32 where exactness matters; the agent's pool is the tier. There are more than four blocks for each one that
    a run fills: saves under way hold at most a quarter, so none is left out, however slow the pool is.
    """
    tier = TierConfig(FACTORY, 20.0, {"socket": str(agent.config.socket)}, is_watched=True) if agent else None
    own = {"dtype": "float32"} if backend == "reference" else {}
    size = fields.get("block_size") or 16
    blocks = -(-2400 // int(size))
    return EngineConfig(str(model), backend, kv_tier=tier, **{"num_blocks": blocks, **own, **fields})


def run(config: EngineConfig, adapter: str = "") -> tuple[dict[str, list[int]], Stats]:
    """A new engine: the neighbours decode while the other requests arrive. Returns the tokens of all."""
    with opened(config) as executor:
        return ask(Engine(config, executor, ByteTokenizer()), adapter)


def ask(engine: Engine, adapter: str) -> tuple[dict[str, list[int]], Stats]:
    id = engine.adapters.load(adapter).id if adapter else 0
    found: dict[str, list[Delta]] = {}
    for request in NEIGHBOURS:
        engine.add(replace(request, adapter=id))
    for _ in range(8):
        for delta in engine.step():
            found.setdefault(delta.request_id, []).append(delta)
    for request in ASKED:
        engine.add(replace(request, adapter=id))
    for name, deltas in drain(engine, max_steps=10**7).items():
        found.setdefault(name, []).extend(deltas)
    return {name: tokens_of(deltas) for name, deltas in found.items()}, engine.stats()


@functools.cache
def computed(model: Path, backend: str, kv_dtype: str, adapter: str) -> dict[str, list[int]]:
    """The answers of one rank without a pool, in blocks of 16; other settings give the same answers."""
    want, _ = run(settings(model, backend, kv_dtype=kv_dtype), adapter)
    assert all(len(want[request.id]) == request.params.max_tokens for request in ASKED)
    return want


def check_equal(model: Path, agent: Agent, backend: str, adapter: str = "", **fields: object) -> None:
    """Computed without a pool = computed and saved = loaded by a new engine; checks that blocks were in fact loaded."""
    want = computed(model, backend, str(fields.get("kv_dtype", "auto")), adapter)
    config = settings(model, backend, agent, **fields)
    cold, first = run(config, adapter)
    warm, second = run(config, adapter)
    assert (cold, first.total_tier_loaded_blocks) == (want, 0)
    assert warm == want
    size = config.block_size or 16
    assert second.total_tier_loaded_blocks >= sum((len(request.prompt_ids) - 1) // size for request in ASKED)


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
@pytest.mark.parametrize("block_size", KERNEL_SIZES)
def test_from_ems_equals_computed_for_every_block_size_of_the_kernels(model, agent, block_size, kv_dtype):
    check_equal(model, agent, "cpu", block_size=block_size, kv_dtype=kv_dtype)


@pytest.mark.parametrize("kv_dtype", ["auto", "bf16", "int8"])
@pytest.mark.parametrize("block_size", ODD_SIZES)
def test_from_ems_equals_computed_for_block_sizes_that_only_the_reference_has(model, agent, block_size, kv_dtype):
    check_equal(model, agent, "reference", block_size=block_size, kv_dtype=kv_dtype)


@pytest.mark.parametrize(("block_size", "kv_dtype"), [(128, "bf16"), (24, "int8")])
def test_from_ems_equals_computed_on_several_ranks(model, agent, block_size, kv_dtype):
    check_equal(model, agent, "reference", block_size=block_size, kv_dtype=kv_dtype, world_size=2)


@pytest.mark.parametrize(("backend", "block_size"), [("cpu", 128), ("cpu", 48), ("reference", 20)])
def test_from_ems_equals_computed_with_an_adapter(model, agent, adapters, backend, block_size):
    check_equal(model, agent, backend, adapters[0], block_size=block_size)
    config = settings(model, backend, agent, block_size=block_size)
    base, stats = run(config)
    assert stats.total_tier_loaded_blocks == 0, "the base model took over an adapter's blocks"
    other, stats = run(config, adapters[1])
    assert stats.total_tier_loaded_blocks == 0, "an adapter took over another's blocks"
    assert base != other


def test_blocks_come_back_from_ems_while_others_are_preempted(model, agent):
    """Too few blocks: one engine preempts sequences, evicts prefixes and loads them again."""
    want, _ = run(settings(model, "cpu", block_size=16))
    tight = settings(model, "cpu", agent, block_size=16, num_blocks=11, num_host_blocks=6, max_seq_len=176)
    num_preempted = num_loaded = 0

    def is_seen() -> bool:
        """On a busy machine the pool's answers come late and sequences run one after the other; then none is
        preempted.
        """
        nonlocal num_preempted, num_loaded
        found, stats = run(tight)
        assert found == want
        num_preempted, num_loaded = num_preempted + stats.total_preemptions, num_loaded + stats.total_tier_loaded_blocks
        return num_preempted > 0 and num_loaded > 0

    until(is_seen)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"block_size": 128}, {"block_size": 64}),
        ({"block_size": 16}, {"block_size": 128}),
        ({"block_size": 64, "kv_dtype": "bf16"}, {"block_size": 64, "kv_dtype": "int8"}),
        ({"block_size": 64, "weight_format": "w8a8"}, {"block_size": 64, "weight_format": "bf16"}),
        ({"block_size": 64}, {"block_size": 64, "backend": "reference"}),
    ],
)
def test_a_restart_with_other_settings_misses_and_the_old_ones_still_find_theirs(model, agent, before, after):
    configs = [settings(model, fields.pop("backend", "cpu"), agent, **fields) for fields in (dict(before), dict(after))]
    wants = [run(replace(config, kv_tier=None))[0] for config in configs]
    for config, want in zip(configs, wants, strict=True):
        found, stats = run(config)
        assert (found, stats.total_tier_loaded_blocks) == (want, 0)
    for config, want in zip(configs, wants, strict=True):
        found, stats = run(config)
        assert found == want
        assert stats.total_tier_loaded_blocks > 0


def test_a_change_of_the_weights_file_misses(model, agent, tmp_path):
    """One number of one tensor differs, in a file of the same name, size and shape."""
    copy = shutil.copytree(model, tmp_path / "model")
    config = settings(copy, "cpu", agent, block_size=64)
    run(config)
    path = next(
        file for file in sorted(copy.glob("*.safetensors")) if "self_attn.k_proj" in str(load_file(file).keys())
    )
    tensors = load_file(path)
    name = next(key for key in tensors if "k_proj" in key)
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    want, _ = run(replace(config, kv_tier=None))
    found, stats = run(config)
    assert (found, stats.total_tier_loaded_blocks) == (want, 0)
    torch.testing.assert_close(load_file(path)[name], tensors[name])


def test_a_weights_file_that_is_replaced_while_it_is_loaded_is_refused(model, agent, tmp_path):
    """The blocks would be named after the new weights but computed with the old ones."""
    copy = shutil.copytree(model, tmp_path / "model")
    config = settings(copy, "cpu", agent, block_size=64)

    def replace_one(done_bytes: int, total_bytes: int) -> None:
        path = sorted(copy.glob("*.safetensors"))[0]
        path.rename(tmp_path / "old")
        shutil.copy(tmp_path / "old", path)

    with pytest.raises(ModelError, match="its files have changed while the model was loaded; load it again"):
        open_runner(config, [], replace_one)
