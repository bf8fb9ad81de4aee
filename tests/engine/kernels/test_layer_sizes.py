"""Layers of one model with heads of their own: of other numbers and sizes, with values of another size than keys."""

from dataclasses import replace

import numpy as np
import pytest

from kvloom.checkpoints import footprint
from kvloom.checkpoints.families.mixers import KimiDelta
from kvloom.checkpoints.families.spec import DecoderSpec
from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import ModelError
from kvloom.rank.kernels import build
from kvloom.rank.kernels.cpu import CpuBackend, CpuOptions
from kvloom.rank.kernels.reference import ReferenceBackend, ReferenceOptions
from kvloom.rank.kv_blocks import KvBlocks
from kvloom.rank.parallel.shard import shard_spec

from .models import Plan, all_logits, ragged, random_weights, rope_of, tiny_spec

AVAILABLE = [isa for isa, (_, needed) in build.ISAS.items() if needed <= build.cpu_flags()]


def with_second_layer(**sizes: int) -> DecoderSpec:
    """A spec of two layers with 4 heads, 2 KV heads of size 32 but for the second layer's `sizes`, and a third one like
    the first.
    """
    spec = tiny_spec(layers=(Plan(rope_of(32)), Plan(rope_of(32), 21), Plan(rope_of(32))))
    first, second, third = (layer.mixer for layer in spec.layers)
    return spec.with_mixers([first, replace(second, **sizes), third])


def test_a_layer_has_the_tensors_of_its_own_heads():
    shapes = with_second_layer(num_heads=8, num_kv_heads=1, head_dim=64, own_value_dim=96).tensor_shapes()
    names = ("q", "k", "v", "o")
    assert [shapes[f"layers.0.{name}"] for name in names] == [(128, 64), (64, 64), (64, 64), (64, 128)]
    assert [shapes[f"layers.1.{name}"] for name in names] == [(512, 64), (64, 64), (96, 64), (64, 768)]


def test_ranks_share_the_heads_of_every_layer():
    mixers = [layer.mixer for layer in shard_spec(with_second_layer(num_heads=8, num_kv_heads=4), 2).layers]
    assert [(own.num_heads, own.num_kv_heads, own.head_dim) for own in mixers] == [(2, 1, 32), (4, 2, 32), (2, 1, 32)]
    with pytest.raises(ModelError, match="2 ranks cannot share 1 KV heads evenly"):
        shard_spec(with_second_layer(num_kv_heads=1), 2)


SIZES = {
    "heads": {"num_heads": 3, "num_kv_heads": 1},  # an output whose padding the wider layers before have written
    "large heads": {"head_dim": 512, "num_kv_heads": 1, "num_heads": 2},
    "larger keys than values": {"head_dim": 576, "own_value_dim": 512, "num_heads": 3, "num_kv_heads": 1},
    "smaller keys than values": {"head_dim": 32, "own_value_dim": 96},
}
TOKENS = [(7 * i + i * i) % 101 for i in range(150)]
BLOCKS = [9, 2, 7, 0, 5]


def logits_of(spec: DecoderSpec, backend: CpuBackend | ReferenceBackend, *cuts: int) -> np.ndarray:
    """Of TOKENS, computed in chunks that end at `cuts`."""
    found, start = [], 0
    for end in (*cuts, len(TOKENS)):
        found.append(all_logits(backend, *ragged([(TOKENS[start:end], start, BLOCKS)])).numpy().copy())
        start = end
    return np.concatenate(found)


def cpu(spec: DecoderSpec, isa: str, weight_format: str, kv_dtype: str) -> CpuBackend:
    options = CpuOptions(weight_format, kv_dtype, 2, isa, block_size=32)
    return CpuBackend(spec, random_weights(spec), 10, options)


@pytest.mark.parametrize("isa", AVAILABLE)
@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
@pytest.mark.parametrize("name", SIZES)
def test_layers_of_different_sizes_compute_what_the_reference_does(name, kv_dtype, isa):
    spec = with_second_layer(**SIZES[name])
    want = logits_of(spec, ReferenceBackend(spec, random_weights(spec), 10, ReferenceOptions(block_size=32)))
    for weight_format, most in (("bf16", 0.03), ("w8a8", 0.07)):
        whole = logits_of(spec, cpu(spec, isa, weight_format, kv_dtype))
        assert np.linalg.norm(whole - want) < most * np.linalg.norm(want)
        assert np.array_equal(logits_of(spec, cpu(spec, isa, weight_format, kv_dtype), 1, 40, 41, 112), whole)


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_a_block_has_each_layer_in_its_own_size(kv_dtype):
    spec = with_second_layer(num_kv_heads=1, head_dim=64, own_value_dim=96)
    scale = 2 if kv_dtype == "int8" else 0
    item = 1 if kv_dtype == "int8" else 2
    sizes = [2 * (32 * item + scale), 2 * (32 * item + scale), 64 * item + scale, 96 * item + scale]
    blocks = KvBlocks(CpuBackend(spec, random_weights(spec), 10, CpuOptions("bf16", kv_dtype, 1, block_size=32)))
    assert [part.shape for layer in blocks.layers for part in layer] == [(10, 32, size) for size in sizes + sizes[:2]]
    token_bytes = sum(sizes) + sum(sizes[:2])
    assert blocks.block_bytes == 32 * token_bytes
    assert footprint.kv_token_bytes(EngineConfig("m", kv_dtype=kv_dtype), "cpu", spec) == token_bytes


def test_channels_of_a_delta_rule_that_fill_no_panels_are_refused_by_name():
    spec = tiny_spec(layers=(Plan(None, recurrent=KimiDelta(3, 16, 4)),))
    with pytest.raises(ModelError, match="a delta rule of 48 channels: the CPU backend has multiples of 32"):
        CpuBackend(spec, random_weights(spec), 4)
