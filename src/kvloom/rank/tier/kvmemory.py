"""KvMemory: a rank's KV cache as the outer tier may use it, checked against the engine's block numbers."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvloom.contract.errors import ModelError
from kvloom.contract.messages import RankInfo
from kvloom.rank.tier.statememory import StateMemory
from kvloom.rank.tier.windowmemory import WindowMemory


@dataclass(frozen=True, slots=True)
class KvMemory:
    """A rank's KV cache, and everything that must agree before another process may use its bytes.

    layers: for each layer its tensors [num_blocks, block_size, ...] (torch, or anything that numpy reads without a
    copy), K before V. A backend may permute the bytes inside a block. num_blocks, block_size (tokens): in the engine's
    blocks, which transfers name; block_bytes: of a block over all tensors. read: the bytes, in pieces, that a step
    reads as a block, found independently of `layers`. model: fingerprint of weights and shape; layout: arithmetic and
    arrangement beyond dtype and shape. rank, world_size: which part of every block this is. states: those of sequences;
    None = the model's layers keep none. windows: blocks of layers with a window; None = these are among `layers`.
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
    states: StateMemory | None = None
    windows: WindowMemory | None = None

    def __post_init__(self) -> None:
        """Raises ModelError for tensors whose first dimension is not these blocks: transfers would move other tokens'
        bytes.
        """
        wanted, total = (self.num_blocks, self.block_size), 0
        for part in (part for layer in self.layers for part in layer):
            if tuple(part.shape[:2]) != wanted:
                raise ModelError(f"the KV cache has blocks and tokens {list(part.shape[:2])}, expected {list(wanted)}")
            total += part.nbytes
        if total != self.num_blocks * self.block_bytes:
            raise ModelError(f"{self.num_blocks} KV blocks have {total} bytes, expected {self.block_bytes} each")

    def check(self, info: RankInfo) -> None:
        """Raises ModelError when the engine, which gets `info`, would number other blocks than these."""
        own, told = (self.num_blocks, self.block_size), (info.num_blocks, info.block_size)
        if own != told:
            raise ModelError(f"the KV cache has blocks and tokens {list(own)}, the engine is told {list(told)}")
        num_bytes = info.kv_bytes - info.window_bytes - info.draft_bytes[1]
        if not 0 <= num_bytes - own[0] * self.block_bytes < self.block_bytes:
            raise ModelError(f"the KV cache has {num_bytes} bytes, its blocks {own[0]} times {self.block_bytes}")
