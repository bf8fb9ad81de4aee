"""Prompt lookup: guesses the tokens that followed the last occurrence of the same n-gram, in prompt or answer. Pure.

Yang et al. 2023 (LLMA) call it reference decoding.
"""

from collections.abc import Sequence
from typing import NamedTuple

_INDEXED_TOKENS = 1 << 16  # of a sequence, its last ones


class Match(NamedTuple):
    """Tokens that may follow, because the `size` tokens before them agree."""

    tokens: Sequence[int] = ()
    size: int = 0


class PromptLookup:
    """The n-grams of one sequence and where each occurred last. Owned by the engine's thread."""

    def __init__(self, min_tokens: int, max_tokens: int, before: Sequence[int] = (), is_guided: bool = False) -> None:
        """Looks up the last `max_tokens` tokens, then half as many, and so on; never fewer than `min_tokens`, but
        behind the forced tokens of an answer that `is_guided` one is enough. `before`: other text, as if it stood
        before the sequence.
        """
        sizes = [max_tokens]
        while sizes[-1] > min_tokens:
            sizes.append(max(min_tokens, sizes[-1] // 2))
        self._free_sizes = sizes
        self._sizes = sizes + [1] * (is_guided and min_tokens > 1)
        # hash of an n-gram -> end of its last occurrence before the current one; a collision is a bad guess
        self._ends: dict[int, int] = {}
        self._num_indexed = 0  # n-grams that end at or before this position are in _ends
        self._before = before
        self._ends_before = {
            hash(tuple(before[end - size : end])): end
            for end in range(len(before))
            for size in self._sizes
            if size <= end
        }

    def propose(self, token_ids: Sequence[int], most: int, forced: Sequence[int] = ()) -> Match:
        """At most `most` tokens that may follow `token_ids` and `forced`; none when no n-gram at their end occurred
        before.

        `token_ids` must extend those of the last call.
        """
        self.index(token_ids)
        keys = self.keys([*token_ids[-self.max_size :], *forced], is_forced=bool(forced))
        return self.match(keys, token_ids, most)

    @property
    def max_size(self) -> int:
        """The most tokens that are looked up."""
        return self._sizes[0]

    @property
    def num_entries(self) -> int:
        """N-grams in the index."""
        return len(self._ends) + len(self._ends_before)

    def keys(self, last: Sequence[int], is_forced: bool = False) -> list[tuple[int, int]]:
        """(size, hash) of each n-gram at the end of `last`, longest first. `is_forced`: a grammar forces the end."""
        sizes = self._sizes if is_forced else self._free_sizes
        return [(size, hash(tuple(last[-size:]))) for size in sizes if size <= len(last)]

    def match(self, keys: Sequence[tuple[int, int]], token_ids: Sequence[int], most: int) -> Match:
        """At most `most` tokens that followed the first known n-gram of `keys` in `token_ids`, those of the last
        `index`, or in the other text.
        """
        for size, key in keys if most > 0 else ():
            if (end := self._ends_before.get(key)) is not None:
                return Match(self._before[end : end + most], size)
            if (end := self._ends.get(key)) is not None:
                return Match(token_ids[end : end + most], size)
        return Match()

    def index(self, token_ids: Sequence[int]) -> None:
        """Enter n-grams that end before the last token, so that the end of the sequence never finds itself."""
        ends = self._ends
        for end in range(max(self._num_indexed + 1, len(token_ids) - _INDEXED_TOKENS), len(token_ids)):
            for size in self._sizes:
                if size <= end:
                    ends[hash(tuple(token_ids[end - size : end]))] = end
        self._num_indexed = max(self._num_indexed, len(token_ids) - 1)
