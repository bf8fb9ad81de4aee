"""KV caches of many shapes, and the expected bytes of everything that is saved from them, derived from the block's
name.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Any

import numpy as np
import torch

from ems.context_caching import ContextCaching

Bytes = np.ndarray
_GUARD = 0xEE
_ITEM = {"float16": 2, "bfloat16": 2, "float32": 4, "uint8": 1, "int64": 8}


@lru_cache(maxsize=256)
def true_bytes(name: str, size: int) -> Bytes:
    """`size` bytes that are unique to the name; read only."""
    seed = int.from_bytes(sha256(name.encode()).digest()[:8], "little")
    data = np.frombuffer(np.random.default_rng(seed).bytes(size), np.uint8)
    data.flags.writeable = False
    return data


@dataclass(frozen=True)
class Shape:
    """The shape of a KV cache. groups: of layers, with tokens a block each; one group without desc is a plain cache.

    item: the elements' type; token: elements of one token in one tensor; gap: elements between two blocks.
    """

    groups: tuple[tuple[tuple[int, ...], int], ...]
    item: str
    token: tuple[int, ...]
    sides: int
    gap: int
    is_torch: bool
    is_grouped: bool
    num_slots: int  # of each group, rounded up to blocks

    @property
    def layout(self) -> str:
        """Equal for shapes whose blocks are interchangeable."""
        return repr(
            (self.groups if self.is_grouped else self.block_size, self.item, self.token, self.sides, self.layers)
        )

    @property
    def layers(self) -> int:
        return sum(len(layers) for layers, _size in self.groups)

    @property
    def block_size(self) -> int:
        return self.groups[0][1]

    @property
    def width(self) -> int:
        """Bytes of a token in one tensor."""
        return int(np.prod(self.token)) * _ITEM[self.item]

    def token_bytes(self, group: int) -> int:
        return self.width * self.sides * len(self.groups[group][0])


class KvCache:
    """A registered cache of a shape. `rows[group]` are its tensors as bytes, each [slots, bytes of a token]."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.bases: list[list[Bytes]] = [[] for _ in shape.groups]
        by_layer: dict[int, list[Any]] = {}
        for group, (layers, size) in enumerate(shape.groups):
            for layer in layers:
                by_layer[layer] = [self._new_tensor(group, size) for _ in range(shape.sides)]
        self.tensors = [by_layer[layer] for layer in sorted(by_layer)]

    def _new_tensor(self, group: int, size: int) -> Any:
        shape, item = self.shape, _ITEM[self.shape.item]
        num_blocks = -(-shape.num_slots // size)
        base = np.full((num_blocks, size * shape.width + shape.gap * item), _GUARD, np.uint8)
        self.bases[group].append(base)
        dtype = {"bfloat16": "int16"}.get(shape.item, shape.item)
        within = [item]
        for length in reversed((size, *shape.token)[1:]):
            within.insert(0, within[0] * length)
        array = np.ndarray((num_blocks, size, *shape.token), dtype, base, 0, (base.strides[0], *within))
        if not shape.is_torch:
            return array
        tensor = torch.from_numpy(array)
        return tensor.view(torch.bfloat16) if shape.item == "bfloat16" else tensor

    def register(self, caching: ContextCaching) -> None:
        groups = [list(layers) for layers, _size in self.shape.groups]
        caching.register_kvcache(self.tensors, groups if self.shape.is_grouped else None)

    def slots(self, group: int) -> int:
        size = self.shape.groups[group][1]
        return -(-self.shape.num_slots // size) * size

    def wipe(self) -> None:
        for bases in self.bases:
            for base in bases:
                base[:] = _GUARD

    def write(self, group: int, slots: Sequence[int], data: Bytes) -> None:
        """data [tensors of the group, slots, bytes of a token]."""
        size, width = self.shape.groups[group][1], self.shape.width
        for base, rows in zip(self.bases[group], data, strict=True):
            tokens = base[:, : size * width].reshape(len(base), size, width) if not self.shape.gap else None
            for slot, row in zip(slots, rows, strict=True):
                block, token = divmod(slot, size)
                if tokens is None:
                    base[block, token * width : (token + 1) * width] = row
                else:
                    tokens[block, token] = row

    def copy(self) -> list[list[Bytes]]:
        return [[base.copy() for base in bases] for bases in self.bases]

    def equals(self, others: list[list[Bytes]]) -> bool:
        return all(
            np.array_equal(mine, other)
            for bases, copies in zip(self.bases, others, strict=True)
            for mine, other in zip(bases, copies, strict=True)
        )


def random_shape(dice: random.Random, slab_bytes: int) -> Shape:
    """A random shape, from one token of a byte to blocks just over the largest that an agent keeps."""
    kind = dice.random()
    is_torch, item = dice.random() < 0.5, dice.choice(["float16", "float32", "uint8", "int64"])
    if is_torch and dice.random() < 0.3:
        item = "bfloat16"
    sides, gap = dice.choice([1, 2, 2]), dice.choice([0, 0, 0, 1, 7, 64])
    if kind < 0.15:  # a block of an odd size
        return Shape((((0,), 5),), "uint8", (3, 823), 1, gap, is_torch, False, 200)
    if kind < 0.25:  # one token a block
        return Shape((((0, 1), 1),), item, (1, dice.choice([1, 3, 64])), sides, gap, is_torch, False, 96)
    if kind < 0.45:  # about as large as the largest allowed block
        block_size = dice.choice([1, 4, 16])
        wanted = slab_bytes // (block_size * _ITEM[item] * sides) + dice.choice([-1, 0, 0, 1])
        return Shape((((0,), block_size),), item, (1, wanted), sides, gap, is_torch, False, 10 * block_size)
    token = dice.choice([(1, 8), (2, 16), (4, 64), (24,)])
    if kind < 0.7:
        groups = dice.choice([(((0, 2), 4), ((1,), 16)), (((1,), 3), ((0,), 8)), (((0, 1, 2), 5),)])
        return Shape(groups, item, token, sides, gap, is_torch, True, 160)
    block_size, layers = dice.choice([2, 3, 4, 16, 128]), dice.choice([1, 2, 5])
    return Shape(((tuple(range(layers)), block_size),), item, token, sides, gap, is_torch, False, 40 * block_size)
