"""The tokens of cached blocks, by what they continue: where a prompt leaves what is known, within a block. Pure."""

from collections.abc import Iterator, Sequence
from itertools import islice

_MOST_COMPARED = 64  # blocks that continue the same tokens: as many beginnings are compared with a prompt, no more


def num_common(left: Sequence[int], right: Sequence[int]) -> int:
    """The number of tokens after which two sequences part."""
    for count, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return count
    return min(len(left), len(right))


class KnownTokens:
    """Which tokens each cached block begins with. Owned by the block pool."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[bytes, tuple[int, ...]]] = {}  # of a block: its parent, its tokens
        self._behind: dict[bytes, dict[int, None]] = {}  # blocks by parent, in the order in which they came

    def __contains__(self, block: int) -> bool:
        return block in self._of

    def learn(self, block: int, parent: bytes, tokens: Sequence[int]) -> None:
        """The block begins with these tokens behind those that `parent` is the hash of. What was known of it goes."""
        self.forget(block)
        self._of[block] = parent, tuple(tokens)
        self._behind.setdefault(parent, {})[block] = None

    def forget(self, block: int) -> None:
        """The block's contents are not known any more."""
        if block in self._of:
            parent, _ = self._of.pop(block)
            del self._behind[parent][block]
            if not self._behind[parent]:
                del self._behind[parent]

    def behind(self, parent: bytes) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Blocks behind `parent` with their tokens, the latest first, not more than are worth a comparison."""
        for block in islice(reversed(self._behind.get(parent, {})), _MOST_COMPARED):
            yield block, self._of[block][1]

    def find(self, parent: bytes, tokens: Sequence[int]) -> tuple[int, int]:
        """The block behind `parent` that begins with most of `tokens`, and with how many; (-1, 0) if there is none."""
        best, most = -1, 0
        for block, known in self.behind(parent):
            if (count := num_common(tokens, known)) > most:
                best, most = block, count
        return best, most
