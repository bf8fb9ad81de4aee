"""KvMemory: a rank's KV cache as others may use it, checked against what the engine is told of it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvloom.contract.errors import ModelError
from kvloom.contract.messages import RankInfo


@dataclass(frozen=True, slots=True)
class KvMemory:
    """A rank's KV cache, and all that must agree before another process may use its bytes.

    layers: for each layer its tensors [num_blocks, block_size, ...] (torch, or anything numpy reads without a copy), K
    before V. A backend may permute the bytes inside a block. num_blocks, block_size (tokens): of the blocks that
    transfers name, which are the engine's; block_bytes: of one over all tensors. read: the bytes, in pieces, that a
    step computes with as a block, found by another way than `layers`. model: a fingerprint of weights and shape;
    layout: how the backend computes and arranges, beyond dtype and shape. rank, world_size: which part of every block
    this is.
    """

    layers: Sequence[Sequence[Any]]
    num_blocks: int
    block_size: int
    block_bytes: int
    read: Callable[[int], Iterable[memoryview]]
    model: str
    layout: str
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        """Raises ModelError for tensors that are not in these blocks: transfers would move other tokens' bytes."""
        wanted, total = (self.num_blocks, self.block_size), 0
        for part in (part for layer in self.layers for part in layer):
            if tuple(part.shape[:2]) != wanted:
                raise ModelError(f"the KV cache has blocks and tokens {list(part.shape[:2])}, expected {list(wanted)}")
            total += part.nbytes
        if total != self.num_blocks * self.block_bytes:
            raise ModelError(f"{self.num_blocks} KV blocks have {total} bytes, expected {self.block_bytes} each")

    def check(self, info: RankInfo) -> None:
        """Raises ModelError when the engine, which is told `info`, would name other blocks than these."""
        own, told = (self.num_blocks, self.block_size), (info.num_blocks, info.block_size)
        if own != told:
            raise ModelError(f"the KV cache has blocks and tokens {list(own)}, the engine is told {list(told)}")
        if not 0 <= info.kv_bytes - own[0] * self.block_bytes < self.block_bytes:
            raise ModelError(f"the KV cache has {info.kv_bytes} bytes, its blocks {own[0]} times {self.block_bytes}")
