"""Layers of one model with heads of their own: a spec describes them, caches and kernels of one size refuse them."""

from dataclasses import replace

import pytest

from kvloom.checkpoints.families.spec import DecoderSpec
from kvloom.contract.errors import ModelError
from kvloom.rank.kernels.cpu import CpuBackend
from kvloom.rank.kernels.reference import ReferenceBackend
from kvloom.rank.parallel.shard import shard_spec

from .models import random_weights, tiny_spec


def with_second_layer(**sizes: int) -> DecoderSpec:
    """A spec of two layers with 4 heads, 2 KV heads of size 32 but for the second layer's `sizes`."""
    spec = tiny_spec()
    first, second = (layer.mixer for layer in spec.layers)
    return spec.with_mixers([first, replace(second, **sizes)])


def test_a_layer_has_the_tensors_of_its_own_heads():
    shapes = with_second_layer(num_heads=8, num_kv_heads=1, head_dim=64).tensor_shapes()
    names = ("q", "k", "v", "o")
    assert [shapes[f"layers.0.{name}"] for name in names] == [(128, 64), (64, 64), (64, 64), (64, 128)]
    assert [shapes[f"layers.1.{name}"] for name in names] == [(512, 64), (64, 64), (64, 64), (64, 512)]


def test_ranks_share_the_heads_of_every_layer():
    mixers = [layer.mixer for layer in shard_spec(tiny_spec(), 2).layers]
    assert [(own.num_heads, own.num_kv_heads, own.head_dim) for own in mixers] == [(2, 1, 32)] * 2


@pytest.mark.parametrize("backend", [CpuBackend, ReferenceBackend])
@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"num_heads": 8}, "num_heads is not supported, got 4 and 8"),
        ({"num_kv_heads": 1}, "num_kv_heads is not supported, got 1 and 2"),
        ({"head_dim": 64}, "head_dim is not supported, got 32 and 64"),
    ],
)
def test_layers_of_different_sizes_are_refused_by_name(backend, sizes, told):
    spec = with_second_layer(**sizes)
    with pytest.raises(ModelError, match=f"llama with layers of different {told}"):
        backend(spec, random_weights(spec), 4)
