"""Prompt lookup: guesses the tokens that followed the last occurrence of the same n-gram, in prompt or answer. Pure.

Yang et al. 2023 (LLMA) call it reference decoding. An index is filled when it is first asked, so a text costs nothing
while no guess can pay.
"""

from collections.abc import Sequence
from typing import NamedTuple

LONG_TOKENS = 4  # an n-gram of fewer tokens is often found by chance
_INDEXED_TOKENS = 1 << 16  # of a sequence, its last ones


class Match(NamedTuple):
    """Tokens that may follow, because the `size` tokens before them agree."""

    tokens: Sequence[int] = ()
    size: int = 0


NOTHING = Match()


class Grams:
    """The n-grams of `size` tokens of a text that grows, and where each last ended before the text's end."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.ends: dict[int | None, int] = {}  # by hash; a collision is a bad guess
        self._num_entered = 0  # n-grams that end at or before this position are in `ends`
        self._last: tuple[int | None, int] = None, 0  # hash of the n-gram that was asked for last, and where it ends

    def enter(self, token_ids: Sequence[int]) -> None:
        """Enter the n-grams that end before the last token, so that the end of the text never finds itself."""
        end = len(token_ids)
        first = max(self._num_entered + 1, end - _INDEXED_TOKENS, self.size)
        if first < end:
            part = token_ids[first - self.size : end - 1]
            grams = zip(*(part[i:] for i in range(self.size)), strict=False)
            self.ends.update(zip(map(hash, grams), range(first, end), strict=True))
        self._num_entered = max(self._num_entered, end - 1)

    def key(self, last: Sequence[int]) -> int | None:
        """The hash of the n-gram at the end of `last`; None if that is shorter."""
        return hash(tuple(last[-self.size :])) if len(last) >= self.size else None

    def find(self, token_ids: Sequence[int]) -> int | None:
        """Where the n-gram at the end of `token_ids` ended before, if it did."""
        end = len(token_ids)
        key, asked = self._last
        if key is not None and asked == end - 1 == self._num_entered + 1:
            self.ends[key] = self._num_entered = asked
        elif self._num_entered < end - 1:
            self.enter(token_ids)
        key = self.key(token_ids)
        self._last = key, end
        return None if key is None else self.ends.get(key)

    def num_entries(self, num_tokens: int) -> int:
        """N-grams of a text of so many tokens, at most."""
        return max(0, min(num_tokens, _INDEXED_TOKENS) - self.size)


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
        self.grams = [Grams(size) for size in sizes]  # the longest first
        self.num_long = sum(size >= LONG_TOKENS for size in sizes)
        self._grams = self.grams + [Grams(1)] * (is_guided and min_tokens > 1)
        self._before = before
        self._grams_before = [Grams(grams.size) for grams in self._grams if before]

    def propose(
        self, token_ids: Sequence[int], most: int, forced: Sequence[int] = (), only_long: bool = False
    ) -> Match:
        """At most `most` tokens that may follow `token_ids` and `forced`; none when no n-gram at their end occurred
        before, of LONG_TOKENS or more if `only_long`.

        `token_ids` must extend those of the last call.
        """
        if most <= 0:
            return NOTHING
        wanted = self._grams if forced else self.grams[: self.num_long] if only_long else self.grams
        if forced or self._before:
            return self._match(token_ids, most, forced, wanted)
        if not wanted or (end := wanted[-1].find(token_ids)) is None:  # then the longer n-grams are new as well
            return NOTHING
        for grams in wanted[:-1]:
            if (longer := grams.find(token_ids)) is not None:
                return Match(token_ids[longer : longer + most], grams.size)
        return Match(token_ids[end : end + most], wanted[-1].size)

    @property
    def max_size(self) -> int:
        """The most tokens that are looked up."""
        return self.grams[0].size

    def _match(self, token_ids: Sequence[int], most: int, forced: Sequence[int], wanted: Sequence[Grams]) -> Match:
        """The same behind forced tokens, or in the other text too."""
        for grams in self._grams_before:
            grams.enter(self._before)
        for grams in self._grams:
            grams.enter(token_ids)
        last = [*token_ids[-self.max_size :], *forced]
        for i, grams in enumerate(wanted):
            key = grams.key(last)
            if self._before and (end := self._grams_before[i].ends.get(key)) is not None:
                return Match(self._before[end : end + most], grams.size)
            if (end := grams.ends.get(key)) is not None:
                return Match(token_ids[end : end + most], grams.size)
        return NOTHING
