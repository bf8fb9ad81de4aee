"""SwapCache: the host's copies of KV blocks. Lives in a rank process, beside the backend's cache."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

Pairs = Sequence[tuple[int, int]]


class SwapCache:
    """Host blocks 0 .. num_blocks-1, each as large as `tiles` neighbouring blocks of the device's cache.

    `parts`: the device's tensors, each [layers, 2, device blocks, ...]; copies keep the bytes as they are.
    """

    def __init__(self, parts: Sequence[Tensor], tiles: int, num_blocks: int) -> None:
        """Pages become resident when first written."""
        self._parts = [_grouped(part, tiles) for part in parts]
        self.num_blocks = num_blocks
        self._host = [
            torch.empty((*part.shape[:2], num_blocks, *part.shape[3:]), dtype=part.dtype) for part in self._parts
        ]

    def save(self, pairs: Pairs) -> None:
        """Copy to the host: (device block, host block)."""
        for part, host in zip(self._parts, self._host, strict=True):
            for block, host_block in pairs:
                host[:, :, host_block].copy_(part[:, :, block])

    def load(self, pairs: Pairs) -> None:
        """Copy back: (host block, device block)."""
        for part, host in zip(self._parts, self._host, strict=True):
            for host_block, block in pairs:
                part[:, :, block].copy_(host[:, :, host_block])

    def measure(self) -> float:
        """Seconds that one block takes one way: the best of several, so that first touches do not count.

        0 without host blocks. Block 0 keeps its contents; nothing may use the host's blocks yet.
        """
        times = []
        for _ in range(5 if self.num_blocks and self._parts[0].shape[2] else 0):
            started = time.perf_counter()
            self.save([(0, 0)])
            self.load([(0, 0)])
            times.append((time.perf_counter() - started) / 2)
        return min(times, default=0.0)


def _grouped(part: Tensor, tiles: int) -> Tensor:
    """A view in which `tiles` neighbouring blocks are one; blocks beyond the last whole group are left out."""
    num_blocks = part.shape[2] // tiles
    return part[:, :, : num_blocks * tiles].view(*part.shape[:2], num_blocks, tiles, *part.shape[3:])
