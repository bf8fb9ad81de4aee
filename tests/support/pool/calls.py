"""Random calls for a random walk: saves and loads by hashes, tokens and layer groups, with the expected bytes."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests.support.pool.shapes import KvCache, true_bytes
from tests.support.pool.worlds import SLAB_BYTES

Slots = list[int]
_CHAIN_BLOCKS = 6
_HASHES = (-(2**70), -1, 0, 1, 2**63, 2**255, 12345)


class Crowded(Exception):
    """The cache has no free slots left for a call."""


@dataclass(frozen=True)
class Hashed:
    """Blocks named by hashes. counts [blocks][groups]: tokens."""

    hashes: list[int]
    counts: list[list[int]]


@dataclass(frozen=True)
class Tokens:
    """A sequence of tokens: the first `fork` tokens are those of `root`, the others are specific to a branch."""

    root: int
    fork: int
    branch: int
    length: int


@dataclass
class Call:
    """What one save or load names: blocks, their slots in each group, and the expected bytes.

    first: tokens at the start of the first block that a load leaves alone.
    """

    arguments: dict[str, Any]
    names: list[str]
    slots: list[list[Slots]]  # [blocks][groups]
    data: list[list[np.ndarray]]  # [blocks][groups], each [tensors, tokens, bytes]
    sizes: list[int]
    first: int = 0

    @property
    def num_fitting(self) -> int:
        """The number of blocks before the first that is larger than any block that an agent keeps."""
        return next((i for i, size in enumerate(self.sizes) if size > SLAB_BYTES), len(self.sizes))


class Calls:
    """Makes random calls for a KV cache."""

    def __init__(self, dice: random.Random, cache: KvCache) -> None:
        self.dice, self.cache, self.shape = dice, cache, cache.shape

    def new_blocks(self) -> Hashed | Tokens:
        """Names of blocks to save or load, without slots."""
        dice, shape = self.dice, self.shape
        if not shape.is_grouped and dice.random() < 0.5:
            length = dice.randrange(1, min(_CHAIN_BLOCKS * shape.block_size, shape.num_slots) + 1)
            return Tokens(dice.randrange(3), dice.randrange(length + 1), dice.randrange(3), length)
        limits = [min(size + size // 2 * (dice.random() < 0.1), shape.num_slots // 8) for _layers, size in shape.groups]
        chosen = dice.sample(range(40), dice.randrange(1, 9))
        hashes = [_HASHES[one] if one < len(_HASHES) else one * 7919 for one in chosen]
        is_full = dice.random() < 0.6
        counts = [
            [
                size if is_full and limit >= size else dice.randrange(1, max(1, limit) + 1)
                for limit, (_layers, size) in zip(limits, shape.groups, strict=True)
            ]
            for _ in hashes
        ]
        return Hashed(hashes, counts)

    def new_call(self, blocks: Hashed | Tokens | None = None, taken: set[tuple[int, int]] | None = None) -> Call:
        """A call for `blocks` or new ones, with slots that are free; raises Crowded. taken: slots of another call."""
        taken = set() if taken is None else taken
        blocks = blocks or self.new_blocks()
        return self._of_tokens(blocks, taken) if isinstance(blocks, Tokens) else self._of_hashes(blocks, taken)

    def _of_hashes(self, blocks: Hashed, taken: set[tuple[int, int]]) -> Call:
        shape, hashes, counts = self.shape, blocks.hashes, blocks.counts
        names = [f"{shape.layout}|h|{h}|{c}" for h, c in zip(hashes, counts, strict=True)]
        slots = [[self._slots(g, n, taken) for g, n in enumerate(one)] for one in counts]
        data = [[self._true(name, g, n) for g, n in enumerate(one)] for name, one in zip(names, counts, strict=True)]
        sizes = [sum(n * shape.token_bytes(g) for g, n in enumerate(one)) for one in counts]
        arguments: dict[str, Any] = {"hashes": self._as_numbers(hashes)}
        if shape.is_grouped:
            arguments["chunk_descs"] = [[(one[g][0], len(one[g])) for one in slots] for g in range(len(shape.groups))]
        else:
            arguments["slot_mapping"] = self._as_numbers([slot for one in slots for slot in one[0]])
            arguments["offsets"] = self._as_numbers([one[0] for one in counts])
        return Call(arguments, names, slots, data, sizes)

    def _of_tokens(self, blocks: Tokens, taken: set[tuple[int, int]]) -> Call:
        dice, shape, size = self.dice, self.shape, self.shape.block_size
        fork, length, most = blocks.fork, blocks.length, _CHAIN_BLOCKS * size
        root = f"{shape.layout}|t|{blocks.root}"
        branch = f"{root}|{fork}|{blocks.branch}"
        owners = [(root, slice(0, fork)), (branch, slice(fork, length))]
        ids = np.concatenate([true_bytes(f"{name}|ids", most * 8).view(np.int64)[part] for name, part in owners])
        data = np.concatenate([self._true(name, 0, most)[:, part] for name, part in owners], axis=1)
        skipped = dice.choice([0, 0, dice.randrange(length + 1)])
        first = length // size + bool(length % size) if skipped == length else skipped // size
        slots = self._slots(0, length, taken)
        arguments = {"slot_mapping": self._as_numbers(slots), "token_ids": self._as_numbers(ids.tolist())}
        if skipped or dice.random() < 0.3:
            mask = [i >= skipped for i in range(length)]
            kinds = [mask, [int(bit) for bit in mask], np.array(mask), np.array(mask, np.uint8), torch.tensor(mask)]
            arguments["mask"] = dice.choice(kinds)
        call = Call(arguments, [], [], [], [], skipped % size)
        for start in range(first * size, length, size):
            end = min(start + size, length)
            call.names.append(f"{root if end <= fork else branch}|{end}")
            call.slots.append([slots[start:end]])
            call.data.append([data[:, start:end]])
            call.sizes.append((end - start) * shape.token_bytes(0))
        return call

    def _true(self, name: str, group: int, count: int) -> np.ndarray:
        """[tensors, tokens, bytes]: the expected bytes in that group's tensors."""
        num_tensors, size = len(self.shape.groups[group][0]) * self.shape.sides, count * self.shape.width
        return np.stack([true_bytes(f"{name}|{group}|{i}", size).reshape(count, -1) for i in range(num_tensors)])

    def _slots(self, group: int, count: int, taken: set[tuple[int, int]]) -> Slots:
        """Free slots: consecutive, or (without groups) anywhere."""
        num, is_grouped = self.cache.slots(group), self.shape.is_grouped
        free = [slot for slot in range(num) if (group, slot) not in taken]
        starts = [s for s in free if s + count <= num and all((group, s + i) not in taken for i in range(count))]
        if starts and (is_grouped or self.dice.random() < 0.7):
            aligned = [s for s in starts if s % self.shape.groups[group][1] == 0]
            start = self.dice.choice(aligned if aligned and self.dice.random() < 0.7 else starts)
            chosen = list(range(start, start + count))
        elif is_grouped or len(free) < count:
            raise Crowded
        else:
            chosen = self.dice.sample(free, count)
        taken.update((group, slot) for slot in chosen)
        return chosen

    def _as_numbers(self, values: list[int]) -> object:
        """In the integer types that real callers use."""
        if min(values, default=0) < -(2**63) or max(values, default=0) >= 2**63:
            return values
        forms = (list, tuple, np.array, _as_numpys_own, _as_tensor)
        return self.dice.choice(forms)(values)


def _as_numpys_own(values: list[int]) -> list[np.int64]:
    return list(np.array(values))


def _as_tensor(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)
