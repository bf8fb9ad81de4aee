"""SwapCache: copies of KV blocks and states in host memory. Lives in a rank process, beside the backend's cache."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

Pairs = Sequence[tuple[int, int]]
States = Sequence[tuple[int, Sequence[int]]]  # (place, the host blocks that its pieces go to or come from)


class SwapCache:
    """Host blocks 0 .. num_blocks-1, each with room for a block of the device's cache and for one of a window's. The
    state of a sequence lies in several: in pieces, each as large as a host block.

    `parts`, `windows`: the device's bytes, each uint8 [device blocks, bytes]; `states` uint8 [places, bytes], None = no
    layer keeps one; `copy` as Backend.copy.
    """

    def __init__(
        self,
        parts: Sequence[Any],
        num_blocks: int,
        copy: Callable[[Any, Any], None] = np.copyto,
        windows: Sequence[Any] = (),
        states: Any = None,
    ) -> None:
        """Memory becomes resident only when it is first written."""
        self.num_blocks, self._copy, self._states = num_blocks, copy, states
        sizes = [int(part.shape[1]) for part in (*parts, *windows)]
        self._host = np.empty((num_blocks, sum(sizes)), np.uint8)
        ends = np.cumsum(sizes).tolist()
        pairs = [
            (part, self._host[:, end - size : end])
            for part, size, end in zip((*parts, *windows), sizes, ends, strict=True)
        ]
        self._parts, self._windows = pairs[: len(parts)], pairs[len(parts) :]

    @property
    def blocks_per_state(self) -> int:
        """Host blocks that one state takes; 0 without states, or without blocks."""
        width = self._host.shape[1]
        return -(-int(self._states.shape[1]) // width) if self._states is not None and width else 0

    def save(self, pairs: Pairs, windows: Pairs = (), states: States = ()) -> None:
        """Copy to the host: (device block, host block), and the states at places."""
        for host, device in self._sides(pairs, windows, states):
            self._copy(host, device)

    def load(self, pairs: Pairs, windows: Pairs = (), states: States = ()) -> None:
        """Copy back: (host block, device block), and the states to places."""
        for host, device in self._sides(_turned(pairs), _turned(windows), states):
            self._copy(device, host)

    def _sides(self, pairs: Pairs, windows: Pairs, states: States) -> Iterator[tuple[Any, Any]]:
        """The bytes on the host and on the device: of (device block, host block), and of each piece of the states."""
        for own, parts in ((pairs, self._parts), (windows, self._windows)):
            for part, host in parts:
                for block, host_block in own:
                    yield host[host_block], part[block]
        width = self._host.shape[1]
        for place, host_blocks in states:
            whole = self._states[place]
            for index, host_block in enumerate(host_blocks):
                piece = whole[index * width : (index + 1) * width]
                yield self._host[host_block, : len(piece)], piece

    def measure(self) -> float:
        """Seconds to copy one block one way: the best of several tries, so that page faults of the first do not count.

        0 without host blocks. Blocks 0 keep their contents; no host block may be in use yet.
        """
        times = []
        first, first_window = ([(0, 0)] if parts and len(parts[0][0]) else [] for parts in (self._parts, self._windows))
        for _ in range(5 if self.num_blocks and first + first_window else 0):
            started = time.perf_counter()
            self.save(first, first_window)
            self.load(first, first_window)
            times.append((time.perf_counter() - started) / 2)
        return min(times, default=0.0)


def _turned(pairs: Pairs) -> Pairs:
    return [(second, first) for first, second in pairs]
