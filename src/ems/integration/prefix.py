"""Prefixes: names of full blocks, a model's kinds of attention, and how long a prefix the pool has. Pure.

A name is a SHA-256 chain over token ids and everything else that determines their KV. The engine's own block hashes
cannot be used: vLLM draws their root at random in every process.
"""

import hashlib
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

ExtraKeys = Callable[[Any, int, int, int], tuple[tuple[Any, ...] | None, int]]
"""(request, first token, end, first multimodal item) -> what else decides the block's KV, next multimodal item."""


class TokenSource(Protocol):
    """What is needed of an engine's request. Tokens are only appended."""

    @property
    def all_token_ids(self) -> Sequence[int]: ...


class Chain:
    """Block hashes of one request, computed as its tokens become known; 256-bit integers."""

    def __init__(self, block_size: int, extra_keys: ExtraKeys, root: bytes = b"") -> None:
        """root: the parent of the first hash; chains with different roots share nothing."""
        self._block_size = block_size
        self._extra_keys = extra_keys
        self._mm_index = 0
        self._previous = root
        self._hashes: list[int] = []

    def upto(self, request: TokenSource, num_blocks: int) -> list[int]:
        """The hashes of the first blocks, which the request's tokens must fill."""
        size = self._block_size
        for start in range(len(self._hashes) * size, num_blocks * size, size):
            tokens = list(request.all_token_ids[start : start + size])
            assert len(tokens) == size, "a block that is not full has no name"
            extra, self._mm_index = self._extra_keys(request, start, start + size, self._mm_index)
            digest = hashlib.sha256(self._previous + struct.pack(f"<{size}q", *tokens))
            digest.update(repr(extra).encode() if extra else b"")
            self._previous = digest.digest()
            self._hashes.append(int.from_bytes(self._previous, "big"))
        return self._hashes[:num_blocks]


@dataclass(frozen=True, slots=True)
class Kind:
    """Groups of layers with the same window; a block in the pool contains the layers of all of them.

    groups: their numbers in the engine. block_size: in tokens. window: number of tokens that a token attends to,
    including itself; None = all before it.
    """

    groups: tuple[int, ...]
    block_size: int
    window: int | None = None

    def first_needed(self, num_tokens: int) -> int:
        """The first block that the token after `num_tokens` tokens attends to."""
        if self.window is None:
            return 0
        return max(0, num_tokens - self.window + 1) // self.block_size

    def range_of(self, start: int, end: int) -> range:
        """The blocks that an engine with `start` tokens lacks in order to continue after `end`. Both are block
        boundaries.
        """
        return range(max(start // self.block_size, self.first_needed(end)), end // self.block_size)


def kinds_of(groups: Sequence[tuple[int, int | None]]) -> tuple[Kind, ...]:
    """From the block size and window of each of an engine's groups; full attention comes first."""
    numbers: dict[tuple[int, int | None], list[int]] = {}
    for number, group in enumerate(groups):
        numbers.setdefault(group, []).append(number)
    kinds = [Kind(tuple(some), block_size, window) for (block_size, window), some in numbers.items()]
    return tuple(sorted(kinds, key=lambda kind: kind.window is not None))


def unit_of(kinds: Sequence[Kind]) -> int:
    """Prefixes end at multiples of this many tokens, where blocks of all kinds end."""
    return math.lcm(*(kind.block_size for kind in kinds))


def longest_hit(kinds: Sequence[Kind], start: int, end: int, count: Callable[[int, int, int], int]) -> int:
    """The number of tokens that an engine with `start` tokens can have by loading: at most `end`; `start` when nothing
    is there.

    count(kind, first, last): length of the run of blocks of kinds[kind] in the pool from `first` on, before `last`.
    """
    unit = unit_of(kinds)

    def reached(number: int) -> int:
        kind = kinds[number]
        wanted = kind.range_of(start, end)
        found = count(number, wanted.start, wanted.stop) if wanted else 0
        # a missing block rules out every prefix that ends behind it and not behind `end`
        return end if found == len(wanted) else (wanted.start + found) * kind.block_size // unit * unit

    for number, kind in enumerate(kinds):
        if kind.window is None and end > start:
            end = reached(number)
    windows = [number for number, kind in enumerate(kinds) if kind.window is not None]
    while end > start:
        shortest = min(map(reached, windows), default=end)
        if shortest == end:
            return end
        end = shortest
    return start
