"""Tensor parallelism: which part of each weight a rank holds (Shoeybi et al. 2019, Megatron-LM, section 3).

Query, key, value, gate and up matrices are cut by output rows, o and down by input columns; so each rank computes whole
heads and whole MLP channels, of each expert too, and two sums over the ranks a layer make the result whole. Embedding,
norms, routers, what makes latents, and head are on every rank.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from kvloom.checkpoints.families.mixers import Attention, Keyed, LatentAttention
from kvloom.checkpoints.families.spec import DecoderSpec, Experts
from kvloom.checkpoints.lora_tensors import LoraPair
from kvloom.checkpoints.quantized.numbers import Floats
from kvloom.checkpoints.source import WeightSource
from kvloom.contract.errors import ModelError

_BY_ROWS = (
    *("q", "k", "v", "q_up", "k_up", "v_up", "q_gate", "q_bias", "k_bias", "v_bias", "sinks"),
    *("gate", "up", "gate_bias", "up_bias", "shared_gate", "shared_up"),
)  # and LoRA's B
_BY_COLUMNS = ("o", "down", "shared_down")  # and LoRA's A: ranks then sum B times their parts of A x


def shard_spec(spec: DecoderSpec, world_size: int) -> DecoderSpec:
    """The model as one rank computes it. Raises ModelError when heads or channels cannot be shared evenly."""
    sizes = [("attention heads", mixer.num_heads) for _, mixer in spec.attention]
    sizes += [("KV heads", mixer.num_kv_heads) for _, mixer in spec.attention if isinstance(mixer, Attention)]
    sizes += [("MLP channels", spec.mlp_size(index)) for index in range(spec.num_layers)]
    if spec.experts:
        sizes += [("channels of an expert", spec.experts.intermediate), ("shared channels", spec.experts.shared)]
    for name, size in sizes:
        if size % world_size:
            raise ModelError(f"worldSize: {world_size} ranks cannot share {size} {name} evenly")
    if spec.encoder and world_size > 1:
        raise ModelError(f"worldSize: one rank computes {spec.family}, got {world_size}")
    if spec.qk_norm == "row" and world_size > 1:
        raise ModelError(
            f"worldSize: the norms of {spec.family} span all heads; one rank computes them, got {world_size}"
        )
    if spec.recurrent and world_size > 1:
        raise ModelError(f"worldSize: one rank computes {spec.family}, whose layers keep states, got {world_size}")
    shared = {index: _share_heads(mixer, world_size) for index, mixer in spec.attention}
    layers = [
        replace(layer, mixer=shared.get(index, layer.mixer), intermediate=spec.mlp_size(index) // world_size)
        for index, layer in enumerate(spec.layers)
    ]
    return replace(
        spec,
        layers=tuple(layers),
        intermediate=spec.intermediate // world_size,
        experts=spec.experts and _share(spec.experts, world_size),
    )


def _share_heads(mixer: Keyed, world_size: int) -> Keyed:
    """Latents, which are made of whole rows, are on every rank."""
    if isinstance(mixer, LatentAttention):
        return replace(mixer, num_heads=mixer.num_heads // world_size)
    return replace(mixer, num_heads=mixer.num_heads // world_size, num_kv_heads=mixer.num_kv_heads // world_size)


def _share(experts: Experts, world_size: int) -> Experts:
    """Every rank has a part of every expert."""
    return replace(experts, intermediate=experts.intermediate // world_size, shared=experts.shared // world_size)


class ShardedWeights:
    """One rank's part of a checkpoint, tensor by tensor."""

    def __init__(self, weights: WeightSource, rank: int, world_size: int) -> None:
        self._weights, self._rank, self._world_size = weights, rank, world_size

    def names(self) -> Iterator[str]:
        return iter(self._weights.names())

    def float32(self, name: str) -> Floats:
        """The values of this rank's part."""
        whole = self._weights.tensor(name).float32()
        part = name.rsplit(".", 1)[-1]
        if self._world_size == 1 or not (part in _BY_ROWS or part in _BY_COLUMNS):
            return whole
        return _part(whole, self._rank, self._world_size, axis=0 if part in _BY_ROWS else 1)


def shard_pair(name: str, pair: LoraPair, rank: int, world_size: int) -> LoraPair:
    """One rank's part of what an adapter adds to the linear `name`."""
    part = name.rsplit(".", 1)[-1]
    if part in _BY_ROWS:
        return replace(pair, b=_part(pair.b, rank, world_size, axis=0))
    if part not in _BY_COLUMNS:
        return pair
    return replace(pair, a=_part(pair.a, rank, world_size, axis=1))


def _part(whole: Floats, rank: int, world_size: int, axis: int) -> Floats:
    return np.ascontiguousarray(np.split(whole, world_size, axis)[rank])
