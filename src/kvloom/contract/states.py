"""States of sequences on their way to and from the outer KV tier: which are asked for, and how they are named. Pure."""

import hashlib
from array import array
from collections.abc import Iterator, Sequence

import msgspec

MOST_SEARCHED = 2048  # tokens before the end of what is known among which a state is searched for


def chain_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Identity of tokens and, through `parent`, of all before them: of a full block, and of the state behind the tokens
    of a part of one. 32 bytes (SHA-256).
    """
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


class KeptState(msgspec.Struct, array_like=True):
    """A state to save: that at `place`, and if it lies within a block (not -1), the contents of that."""

    place: int
    block: int
    key: bytes  # chain_hash of the tokens before it


class Search(msgspec.Struct, array_like=True):
    """Which state of a prompt to load: the one behind the most tokens, at least `least`, before which all full blocks
    are known, of the engine or of the tier.

    `num_known`: blocks at its beginning that the engine has; those that are to be loaded follow. From block `first` on:
    `parents`, for each block what its hash continues, and `token_ids`.
    """

    least: int
    num_known: int
    first: int
    parents: list[bytes]
    token_ids: list[int]

    def candidates(self, num_blocks: int, block_size: int) -> Iterator[tuple[int, bytes]]:
        """(tokens before the state, its key), the longest first, if the first `num_blocks` blocks are known."""
        start = self.first * block_size
        end = min(start + len(self.token_ids), (num_blocks + 1) * block_size - 1)
        for position in range(end, max(self.least, end - MOST_SEARCHED, start + 1) - 1, -1):
            index = (position - 1) // block_size - self.first
            tail = self.token_ids[index * block_size : position - start]
            yield position, chain_hash(self.parents[index], tail)


class FoundState(msgspec.Struct, array_like=True):
    """What becomes of the state that transfer `id` has found: it is written to `place`, and if it lies within a block,
    the contents of that to `block`. `place` -1: there is no room for it.
    """

    id: int
    place: int = -1
    block: int = -1
