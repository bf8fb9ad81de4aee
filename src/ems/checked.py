"""Checked: copies of blocks with checksums by Python's xxhash; native/tensors.py does the same in C++."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import xxhash

from ems.runs import Block, Bytes

SUM_BYTES = 16


class Checked(ABC):
    """The base of classes that copy blocks, which adds checksums."""

    @abstractmethod
    def gather(self, blocks: Sequence[Block], targets: Sequence[Bytes]) -> None:
        """Fills each target with its block's bytes."""

    @abstractmethod
    def scatter(self, blocks: Sequence[Block], sources: Sequence[Bytes]) -> None:
        """Writes each source to its block's tokens."""

    def gather_summed(self, blocks: Sequence[Block], targets: Sequence[Bytes]) -> bytes:
        """As `gather`; returns the checksums of what the targets hold then."""
        self.gather(blocks, targets)
        return b"".join(xxhash.xxh3_128_digest(target.data) for target in targets)

    def scatter_checked(self, blocks: Sequence[Block], sources: Sequence[Bytes], sums: bytes) -> int:
        """As `scatter`, up to the first source whose checksum differs. Returns how many were written."""
        expected = (sums[start : start + SUM_BYTES] for start in range(0, len(sums), SUM_BYTES))
        pairs = enumerate(zip(sources, expected, strict=True))
        count = next((i for i, (source, one) in pairs if xxhash.xxh3_128_digest(source.data) != one), len(sources))
        self.scatter(blocks[:count], sources[:count])
        return count
