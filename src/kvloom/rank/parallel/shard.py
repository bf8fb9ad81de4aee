"""Tensor parallelism: which part of each weight a rank holds (Shoeybi et al. 2019, Megatron-LM, section 3).

Query, key, value, gate and up matrices are cut by output rows, o and down by input columns; so each rank computes whole
heads and whole MLP channels, of each expert too, and two sums over the ranks a layer make the result whole. Embedding,
norms, routers, what makes latents, and head are on every rank. A mixer with a state is cut by heads in the same way: of
a matrix that has several kinds of rows, one below the other, each rank has its part of each kind.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kvloom.checkpoints.families.mixers import (
    Attention,
    DeltaRule,
    KimiDelta,
    LatentAttention,
    Mamba2,
    Mixer,
    Recurrent,
    ShortConv,
    out_name,
)
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
    sizes += [own for _, mixer in spec.recurrent for own in _counts(mixer)]
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
    layers = [
        replace(
            layer,
            mixer=_share_heads(layer.mixer, world_size),
            beside=_share_states(layer.beside, world_size) if layer.beside is not None else None,
            intermediate=spec.mlp_size(index) // world_size,
        )
        for index, layer in enumerate(spec.layers)
    ]
    return replace(
        spec,
        layers=tuple(layers),
        intermediate=spec.intermediate // world_size,
        experts=spec.experts and _share(spec.experts, world_size),
    )


def _share_heads(mixer: Mixer | None, world_size: int) -> Mixer | None:
    """Latents, which are made of whole rows, are on every rank."""
    if mixer is None or isinstance(mixer, Recurrent):
        return None if mixer is None else _share_states(mixer, world_size)
    if isinstance(mixer, LatentAttention):
        return replace(mixer, num_heads=mixer.num_heads // world_size)
    return replace(mixer, num_heads=mixer.num_heads // world_size, num_kv_heads=mixer.num_kv_heads // world_size)


def _share_states(mixer: Recurrent, world_size: int) -> Recurrent:
    match mixer:
        case DeltaRule():
            heads = mixer.num_k_heads // world_size, mixer.num_v_heads // world_size
            return replace(mixer, num_k_heads=heads[0], num_v_heads=heads[1])
        case KimiDelta():
            return replace(mixer, num_heads=mixer.num_heads // world_size)
        case Mamba2():
            groups = mixer.num_groups // world_size
            return replace(mixer, num_heads=mixer.num_heads // world_size, num_groups=groups)
        case ShortConv():
            return replace(mixer, size=mixer.size // world_size)


def _counts(mixer: Recurrent) -> list[tuple[str, int]]:
    """What of it must divide."""
    match mixer:
        case DeltaRule():
            return [("key heads of the delta rule", mixer.num_k_heads)]
        case KimiDelta():
            return [("heads of the delta rule", mixer.num_heads)]
        case Mamba2():
            return [("groups of heads of Mamba-2", mixer.num_groups)]
        case ShortConv():
            return [("channels of a short convolution", mixer.size)]


Kinds = tuple[tuple[int, int], ...]


def _kinds(mixer: Recurrent) -> dict[str, Kinds]:
    """Of each tensor that is cut its kinds of rows, in order, and of out_name those of columns. Each is (times, rows):
    so many rows come so often one after the other, and ranks have their part of each time.
    """
    found: list[tuple[Kinds, Sequence[str]]]
    match mixer:
        case DeltaRule():
            times = mixer.num_v_heads // mixer.num_k_heads if mixer.is_tiled else 1
            keys, heads, values = (1, mixer.k_size), (times, mixer.num_v_heads // times), (times, mixer.size // times)
            found = [((keys, keys, values), ("conv_in", "conv")), ((values,), ("gate_in", "out"))]
            found += [((heads,), ("beta_in", "decay_in", "decay", "decay_bias"))]
        case KimiDelta():
            parts = "q", "k", "v", "q_conv", "k_conv", "v_conv", "decay_up", "decay_bias", "out_gate_up", "o"
            found = [(((1, mixer.size),), parts), (((1, mixer.num_heads),), ("beta_in", "decay"))]
        case Mamba2():
            channels, shared = (1, mixer.size), (1, mixer.num_groups * mixer.state_dim)
            found = [((channels, shared, shared), ("conv_in", "conv", "conv_bias"))]
            found += [((channels,), ("gate_in", "out_norm", "out"))]
            found += [(((1, mixer.num_heads),), ("decay_in", "decay", "decay_bias", "skip"))]
        case ShortConv():
            found = [(((3, mixer.size),), ("short_in",)), (((1, mixer.size),), ("conv", "out"))]
    return {part: kinds for kinds, parts in found for part in parts}


def _share(experts: Experts, world_size: int) -> Experts:
    """Every rank has a part of every expert."""
    return replace(experts, intermediate=experts.intermediate // world_size, shared=experts.shared // world_size)


class ShardedWeights:
    """One rank's part of a checkpoint of `spec`, tensor by tensor."""

    def __init__(self, weights: WeightSource, spec: DecoderSpec, rank: int, world_size: int) -> None:
        self._weights, self._spec, self._rank, self._world_size = weights, spec, rank, world_size

    def names(self) -> Iterator[str]:
        return iter(self._weights.names())

    def float32(self, name: str) -> Floats:
        """The values of this rank's part."""
        whole = self._weights.tensor(name).float32()
        cut = _cut(name, self._spec) if self._world_size > 1 else None
        return whole if cut is None else _part(whole, self._rank, self._world_size, cut)


def shard_pair(name: str, pair: LoraPair, spec: DecoderSpec, rank: int, world_size: int) -> LoraPair:
    """One rank's part of what an adapter adds to the linear `name` of `spec`."""
    cut = _cut(name, spec) if world_size > 1 else None
    if cut is None:
        return pair
    if cut.axis == 0:
        return replace(pair, b=_part(pair.b, rank, world_size, cut))
    return replace(pair, a=_part(pair.a, rank, world_size, cut))


class _Cut(NamedTuple):
    """Along which axis a tensor is cut. `kinds`: see _kinds; () = it has one."""

    axis: int
    kinds: Kinds = ()


def _cut(name: str, spec: DecoderSpec) -> _Cut | None:
    """None = every rank has all of the tensor."""
    part = name.split(".", 2)[-1]
    for index, mixer in spec.recurrent:
        kinds = _kinds(mixer).get(part) if name.startswith(f"layers.{index}.") else None
        if kinds is not None:
            return _Cut(1 if part == out_name(mixer) else 0, kinds)
    part = part.rsplit(".", 1)[-1]
    return _Cut(0) if part in _BY_ROWS else _Cut(1) if part in _BY_COLUMNS else None


def _part(whole: Floats, rank: int, world_size: int, cut: _Cut) -> Floats:
    rows = np.moveaxis(whole, cut.axis, 0)
    pieces, first = [], 0
    for times, count in cut.kinds or ((1, len(rows)),):
        own = rows[first : first + times * count].reshape(times, count, *rows.shape[1:])
        pieces.append(np.split(own, world_size, 1)[rank].reshape(-1, *rows.shape[1:]))
        first += times * count
    return np.ascontiguousarray(np.moveaxis(np.concatenate(pieces), 0, cut.axis))
