"""The one contract between the runner and whatever computes: a backend runs a ragged step over a paged KV cache."""

from collections.abc import Sequence
from typing import Protocol

import torch


class Backend(Protocol):
    """Owns the packed weights and the KV cache of one model on one device."""

    name: str
    block_size: int  # tokens a KV block
    num_blocks: int
    kv_bytes: int
    weight_bytes: int
    kv_layout: str  # how bytes lie in a block of the KV cache, beyond dtype and shape, and how they are computed

    def kv_layers(self) -> Sequence[Sequence[torch.Tensor]]:
        """The KV cache itself: K and V of each layer, [num_blocks, block_size, ...], contiguous in a block."""
        ...

    def step(
        self,
        ids: torch.Tensor,
        pos: torch.Tensor,
        qstart: torch.Tensor,
        block_table: torch.Tensor,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """One step over T tokens of S sequences; writes their keys and values, returns logits of the asked rows.

        ids, pos [T] int32: token ids and positions; qstart [S+1] int32: tokens qstart[s] .. qstart[s+1] belong to s, at
        consecutive positions; block_table [S, max_blocks] int32, -1 = unused: position p of s lives in slot
        p % block_size of block block_table[s, p // block_size]; rows [R] int32: which tokens' logits are wanted.
        Returns [R, vocab] float32, valid until the next step. The result for a sequence does not depend on the others
        in the step.
        """
        ...
