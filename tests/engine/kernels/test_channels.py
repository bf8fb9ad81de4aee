"""W8A8 with one scale per channel and one per token: its definition, and bits that do not depend on other sequences."""

import functools
import itertools

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from kvloom.checkpoints import footprint
from kvloom.checkpoints.lora import read_adapter
from kvloom.contract.config import EngineConfig
from kvloom.rank.kernels import build
from kvloom.rank.kernels.cpu import CpuBackend, CpuOptions
from kvloom.rank.kernels.reference import ReferenceBackend
from tests.support.models.adapters import make_adapter

from .models import SPECS, MemoryWeights, all_logits, by_channel, ragged, random_weights

AVAILABLE = [isa for isa, (_, needed) in build.ISAS.items() if needed <= build.cpu_flags()]
VECTORS = [isa for isa in AVAILABLE if isa != "portable"] or AVAILABLE  # the portable kernels take seconds per step
OTHERS = itertools.cycle(VECTORS[1:] or VECTORS)
NAMES = ("smollm2 heads", "qwen2", "gelu, uneven sizes", "gemma2", "mixture of experts", "gpt-oss")
EACH_MODEL = pytest.mark.parametrize(
    ("name", "isa"), [(name, isa) for name in NAMES for isa in (VECTORS[0], next(OTHERS))]
)


@functools.cache
def weights_of(name: str, *left: str) -> MemoryWeights:
    return by_channel(random_weights(SPECS[name]), left)


@functools.cache
def cpu(name: str, isa: str, *left: str, threads: int = 2) -> CpuBackend:
    return CpuBackend(SPECS[name], weights_of(name, *left), 96, CpuOptions("stored", num_threads=threads, isa=isa))


@pytest.fixture(scope="module", autouse=True)
def forget():
    yield
    weights_of.cache_clear()
    cpu.cache_clear()


def parts_of(lengths: list[int]) -> list[tuple[list[int], int, list[int]]]:
    tokens = torch.randint(0, 96, (300,), generator=torch.Generator().manual_seed(4)).tolist()
    return [(tokens[i : i + length], 0, [5 * i + at for at in range(5)]) for i, length in enumerate(lengths)]


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


def normed(weights: MemoryWeights, token: int) -> Tensor:
    """What the first layer's q, k and v matrices read for a token: its embedding after the norm."""
    x = weights.values["embed"][token].bfloat16().float()
    norm_eps = SPECS["smollm2 heads"].norm_eps
    return x * (x.square().mean() + norm_eps).rsqrt() * weights.values["layers.0.attn_norm"]


def value_of(backend: CpuBackend, token: int) -> Tensor:
    """The first layer's value vector of a token, read from the cache."""
    own = SPECS["smollm2 heads"].attention[0][1]
    all_logits(backend, *ragged([([token], 0, [7])]))
    _, values = backend.kv_layers[0]
    tiles = torch.from_numpy(values[7].copy()).view(torch.bfloat16)  # [heads][pairs of keys][dim][2]
    return tiles.view(own.num_kv_heads, 8, own.head_dim, 2)[:, 0, :, 0].flatten()


@pytest.mark.parametrize("isa", AVAILABLE)
def test_a_matrix_reads_8_bits_of_a_token_with_one_scale(isa):
    """Over 97 % of the first layer's values, which the cache holds in bfloat16, are exactly those of the definition."""
    weights, token = weights_of("smollm2 heads"), 5
    x = normed(weights, token)
    scale = x.abs().max() / 127
    want = torch.from_numpy(weights.tensor("layers.0.v").float32()) @ (x / scale).round() * scale
    assert (value_of(cpu("smollm2 heads", isa), token) == want.bfloat16()).float().mean() > 0.97


@pytest.mark.parametrize("isa", AVAILABLE)
def test_numbers_that_are_held_in_groups_are_still_those_of_the_file(isa):
    """If not all of q, k and v have channel scales, 32 values of a token share a scale; the file's weights stay."""
    left, token = ("q", "k"), 5
    weights = weights_of("smollm2 heads", *left)
    x = normed(weights, token).view(-1, 32)
    scale = x.abs().amax(1, keepdim=True) / 127
    read = ((x / scale).round() * scale).flatten()
    want = torch.from_numpy(weights.tensor("layers.0.v").float32()) @ read
    assert (value_of(cpu("smollm2 heads", isa, *left), token) == want.bfloat16()).float().mean() > 0.97


@EACH_MODEL
def test_logits_are_near_the_reference(name, isa):
    args = ragged(parts_of([1, 7, 40]))
    want = all_logits(ReferenceBackend(SPECS[name], weights_of(name), 96), *args).clone()
    assert error(all_logits(cpu(name, isa), *args), want) < (0.1 if SPECS[name].experts else 0.05)


@EACH_MODEL
@given(lengths=st.lists(st.integers(1, 70), min_size=1, max_size=6))
@example(lengths=[70] * 8)  # more rows than one pass takes
@example(lengths=[1])
@example(lengths=[1, 1])
def test_rows_have_the_same_bits_in_every_company(name, isa, lengths):
    backend, parts = cpu(name, isa), parts_of(lengths)
    together = all_logits(backend, *ragged(parts)).clone()
    alone = torch.cat([all_logits(backend, *ragged([part])).clone() for part in parts])
    assert torch.equal(together, alone)


@EACH_MODEL
def test_chunks_and_threads_change_no_bit(name, isa):
    tokens, _, blocks = parts_of([70])[0]
    want = all_logits(cpu(name, isa), *ragged([(tokens, 0, blocks)])).clone()
    cuts = itertools.pairwise([0, 1, 3, 11, 12, 45, 70])
    pieces = [all_logits(cpu(name, isa), *ragged([(tokens[at:end], at, blocks)])).clone() for at, end in cuts]
    assert torch.equal(torch.cat(pieces), want)
    assert torch.equal(all_logits(cpu(name, isa, threads=3), *ragged([(tokens, 0, blocks)])), want)


LEFT = [
    ("smollm2 heads", ("v",)),
    ("smollm2 heads", ("gate",)),
    ("mixture of experts", ("experts.3.up",)),
    ("mixture of experts", ("experts.0.down", "shared_gate")),
]


@pytest.mark.parametrize(("name", "left"), LEFT)
def test_beside_a_matrix_that_is_left_as_it_was_the_others_have_groups(name, left):
    """Matrices that read the same activations share one format of them; all matrices keep their values."""
    args = ragged(parts_of([1, 2, 40]))
    backend = cpu(name, AVAILABLE[0], *left)
    want = all_logits(ReferenceBackend(SPECS[name], weights_of(name, *left), 96), *args).clone()
    together = all_logits(backend, *args).clone()
    assert error(together, want) < 0.05
    assert torch.equal(together[:1], all_logits(backend, *ragged(parts_of([1, 2, 40])[:1])))


@pytest.mark.parametrize("isa", AVAILABLE)
def test_adapters_are_added_beside_it(tmp_path, isa):
    name = "smollm2 heads"
    spec, shapes = SPECS[name], SPECS[name].tensor_shapes()
    adapter = read_adapter(make_adapter(tmp_path / "1", shapes, 1, 4, ("q", "o", "down")), shapes)
    backend = CpuBackend(spec, weights_of(name), 96, CpuOptions("stored", num_threads=2, isa=isa))
    backend.add_adapter(1, adapter)
    want = ReferenceBackend(spec, weights_of(name), 96)
    want.add_adapter(1, adapter)
    parts = parts_of([40, 9])
    got = all_logits(backend, *ragged(parts, [1, 0])).clone()
    assert error(got, all_logits(want, *ragged(parts, [1, 0]))) < 0.07  # the adapter is in 8 bits as well
    assert not torch.equal(got[:40], all_logits(backend, *ragged(parts, [0, 0]))[:40])


def test_it_takes_the_memory_that_was_foretold():
    spec = SPECS["smollm2 heads"]
    config = EngineConfig(model="m")
    weights = weights_of("smollm2 heads")
    assert footprint.weight_format(config, spec, weights.form) == "stored"
    backend = cpu("smollm2 heads", AVAILABLE[0])
    assert backend.weight_bytes == pytest.approx(footprint.weight_bytes(config, "cpu", spec, weights.form), rel=0.08)
    assert backend.held_as == "as the file has them (15 in 8 bits)"


def test_a_row_of_nothing_and_rows_of_any_size_stay_numbers():
    spec = SPECS["qwen2"]  # its biases remain where activations are zero
    weights = random_weights(spec)
    for size in (0.0, 1e-30, 1e9):
        weights.values["layers.0.attn_norm"].fill_(size)
        backend = CpuBackend(spec, by_channel(weights), 96, CpuOptions("stored", num_threads=1))
        assert all_logits(backend, *ragged(parts_of([3, 40]))).isfinite().all()
