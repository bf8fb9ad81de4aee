"""SwapCache: copies of KV blocks in host memory. Lives in a rank process, beside the backend's cache."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Pairs = Sequence[tuple[int, int]]


class SwapCache:
    """Host blocks 0 .. num_blocks-1, each as large as one of the device's cache.

    `parts`: the device's bytes, each uint8 [device blocks, ...]; `copy` as Backend.copy.
    """

    def __init__(self, parts: Sequence[Any], num_blocks: int, copy: Callable[[Any, Any], None] = np.copyto) -> None:
        """Memory becomes resident only when it is first written."""
        self._parts, self._copy = parts, copy
        self.num_blocks = num_blocks
        self._host = [np.empty((num_blocks, *part.shape[1:]), np.uint8) for part in parts]

    def save(self, pairs: Pairs) -> None:
        """Copy to the host: (device block, host block)."""
        for part, host in zip(self._parts, self._host, strict=True):
            for block, host_block in pairs:
                self._copy(host[host_block], part[block])

    def load(self, pairs: Pairs) -> None:
        """Copy back: (host block, device block)."""
        for part, host in zip(self._parts, self._host, strict=True):
            for host_block, block in pairs:
                self._copy(part[block], host[host_block])

    def measure(self) -> float:
        """Seconds to copy one block one way: the best of several tries, so that page faults of the first do not count.

        0 without host blocks. Block 0 keeps its contents; no host block may be in use yet.
        """
        times = []
        for _ in range(5 if self.num_blocks and self._parts and len(self._parts[0]) else 0):
            started = time.perf_counter()
            self.save([(0, 0)])
            self.load([(0, 0)])
            times.append((time.perf_counter() - started) / 2)
        return min(times, default=0.0)
